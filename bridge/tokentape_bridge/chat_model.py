"""A model's way with text: how conversations become ids, and what completions say.

Conversations are rendered by the model's own chat template. Completions are read by the text forms of `answers`, or,
where a family of the `renderers` package was chosen, by that family's renderer, which also bridges turns that the
template cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tokentape.v1 import types_pb2
from tokentape_bridge.answers import Answer, parse_answer, reasoning_is_open
from tokentape_bridge.errors import ApiError
from tokentape_bridge.families import Family
from tokentape_bridge.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokentape_bridge.parents import Conversation


class ChatModel:
    """One served model's tokenizer, template and forms (a `ChatText`). CPU work; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_token_ids: Sequence[int],
        family: Family | None = None,
        reads_reasoning: bool = True,
    ) -> None:
        """`stop_token_ids` are the model's terminators, `family` its renderer.

        `reads_reasoning`: whether `<think>` is taken for reasoning, or left in the content.
        """
        self.tokenizer = tokenizer
        self.family = family
        self._stop_token_ids = frozenset(stop_token_ids)
        self._reads_reasoning = reads_reasoning
        self.render_text = tokenizer.render_text
        self.shield = tokenizer.shield
        self.encode_shielded = tokenizer.encode_shielded
        self.spells_special_token = tokenizer.spells_special_token

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The model's terminators."""
        return self._stop_token_ids

    @property
    def added_token_ids(self) -> frozenset[int]:
        """The ids that stand for whole texts, whatever stands around them."""
        return self.tokenizer.added_token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render(self, conversation: Conversation) -> list[int]:
        """Return the ids of the whole conversation. Raises `ApiError`.

        The family's renderer does it only for a tokenizer that comes without a template.
        """
        if self.family is not None and not self.tokenizer.has_template:
            if conversation.template_arguments:
                field = "chat_template_kwargs"
                raise ApiError(f"{field}: there is no chat template that takes any", param=field, code="invalid_value")
            return self.family.render(
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
            )
        return self.tokenizer.render(
            conversation.messages,
            tools=conversation.tools,
            template_arguments=conversation.template_arguments,
            add_generation_prompt=conversation.add_generation_prompt,
        )

    def parse(
        self,
        token_ids: Sequence[int],
        completion: types_pb2.Completion | None,
        conversation: Conversation,
        *,
        with_tools: bool,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> Answer:
        """Return what a completion says that was sampled after `conversation`.

        `completion` is how it ended, `None` if it has not. Tool calls are read if `with_tools` and there are tools.
        The others are the request's: whether special tokens are left out of the text, and where a stop string counts.
        """
        with_tools = with_tools and bool(conversation.tools)
        if self.family is not None:
            answer = self.family.parse(
                token_ids,
                prompt_token_ids=self.render(conversation),
                tools=conversation.tools,
                with_tools=with_tools,
            )
            return replace(answer, content=_before_stop_string(answer.content, completion))
        text = self._text(token_ids, completion, skip_special_tokens=skip_special_tokens, min_tokens=min_tokens)
        return parse_answer(
            text,
            with_tools=with_tools,
            with_reasoning=self._reads_reasoning,
            reasoning_is_open=self._reads_reasoning and self._opens_reasoning(conversation),
        )

    def _text(
        self,
        token_ids: Sequence[int],
        completion: types_pb2.Completion | None,
        *,
        skip_special_tokens: bool,
        min_tokens: int,
    ) -> str:
        """Return a completion's text without its stop token, and up to its stop string."""
        if completion is not None and ended_by_token(completion):
            token_ids = token_ids[:-1]
        text = self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # Within the first min_tokens a stop string does not count; one that ends later does.
        spared = self.decode(token_ids[:min_tokens], skip_special_tokens=skip_special_tokens)
        return _before_stop_string(text, completion, spared=len(spared))

    def _opens_reasoning(self, conversation: Conversation) -> bool:
        return self.tokenizer.template_mentions("<think>") and reasoning_is_open(
            self.render_text(
                conversation.messages,
                tools=conversation.tools,
                template_arguments=conversation.template_arguments,
                add_generation_prompt=conversation.add_generation_prompt,
            )
        )


def ended_by_token(completion: types_pb2.Completion) -> bool:
    """Whether a completion's last token is the one that ended it."""
    return completion.finish_reason == types_pb2.FINISH_REASON_STOP and not completion.HasField("stop_string")


def _before_stop_string(text: str, completion: types_pb2.Completion | None, *, spared: int = 0) -> str:
    """Return `text` up to the stop string that ended it, which does not lie within the first `spared` characters."""
    if completion is None or not completion.HasField("stop_string"):
        return text
    start = text.find(completion.stop_string, max(0, spared - len(completion.stop_string) + 1))
    return text if start < 0 else text[:start]
