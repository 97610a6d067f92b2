"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`.

A translation and nothing else: a request becomes that of a chat with the same conversation (`requests`, `history`), so
that both have the same prompts and continue each other's calls, and what the model says becomes content blocks
(`blocks`, `answers`). Errors are translated where they leave the bridge (`errors`).
"""
