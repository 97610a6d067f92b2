"""What stands for a rollout that failed every time: one token, really sampled from the rollout's prompt.

The prompt is that of the first call of the last attempt that reached the engine, id for id. Where none did, a chat of
the task's messages is made at the bridge. The rollout's sampling policy holds, but for the number of tokens: one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from tokentape.v1 import types_pb2
from tokentape_executor.attempts import Agent, TapeTerms
from tokentape_executor.errors import NothingSampled
from tokentape_executor.rollout import Outcome, Row
from tokentape_executor.rollout_client import RolloutClient
from tokentape_executor.tape_client import TapeClient

Messages = Sequence[Mapping[str, Any]]
"""A chat, as OpenAI's API takes it."""

OUTCOME = Outcome(0.0)
"""A placeholder's: worth nothing, and not cut short by a limit."""


def messages_of(task: Row) -> Messages:
    """Return the chat that `task` begins with, by the field it is in; a text becomes a user's message.

    The fields, of which the first counts: `responses_create_params.input` (NeMo Gym's), `messages`, `prompt` and
    `question`. Raises `NothingSampled` where there is none.
    """
    params = cast("Mapping[str, Any]", task.get("responses_create_params") or {})
    for found in (params.get("input"), task.get("messages"), task.get("prompt"), task.get("question")):
        if found:
            return [{"role": "user", "content": found}] if isinstance(found, str) else cast("Messages", found)
    raise NothingSampled(
        "the task has no chat to sample from (responses_create_params.input, messages, prompt or question); override "
        "placeholder_messages"
    )


def from_prompt(tapes: TapeClient, prompt_token_ids: Sequence[int]) -> Agent:
    """Return an agent that samples after this prompt."""

    async def sample(client: RolloutClient) -> Outcome:
        await tapes.sample(client.tape_id, prompt_token_ids, types_pb2.SamplingParameters(max_tokens=1))
        return OUTCOME

    return sample


def from_messages(messages: Messages) -> Agent:
    """Return an agent that samples an answer to this chat."""

    async def ask(client: RolloutClient) -> Outcome:
        await client.chat.completions.create(model=client.model, messages=cast("Any", messages), max_tokens=1)
        return OUTCOME

    return ask


def one_token(terms: TapeTerms) -> TapeTerms:
    """Return the terms of a tape that has exactly one sampled token, whatever number the policy wants."""
    policy = types_pb2.SamplingParameters()
    if terms.sampling_policy is not None:
        policy.CopyFrom(terms.sampling_policy)
    policy.n = policy.max_tokens = 1
    # It also keeps the stop tokens from being the first.
    policy.min_tokens = min(policy.min_tokens, 1)
    return replace(terms, sampling_policy=policy, must_sample=True)
