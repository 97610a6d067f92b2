"""Fixtures that unit tests share."""

from support.tokenizers import chat_model, tokenizer_directory

__all__ = ["chat_model", "tokenizer_directory"]
