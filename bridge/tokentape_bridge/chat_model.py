"""A model's way with text: how conversations become ids, and what completions say.

Conversations are rendered by the model's own chat template. Completions are read by the text forms of `answers`, or,
where a family of the `renderers` package was chosen, by that family's renderer, which also bridges turns that the
template cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokentape.v1 import types_pb2
from tokentape_bridge.answers import Answer, parse_answer, reasoning_is_open
from tokentape_bridge.families import Family
from tokentape_bridge.messages import TemplateMessage
from tokentape_bridge.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokentape_bridge.continuation import Conversation


class ChatModel:
    """One served model's tokenizer, template and forms. CPU work; safe to use from several threads."""

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
        self.stop_token_ids = frozenset(stop_token_ids)
        self._family = family
        self._reads_reasoning = reads_reasoning

    @property
    def special_texts(self) -> frozenset[str]:
        """The texts that the tokenizer takes for special tokens (see `ChatText`)."""
        return self.tokenizer.special_texts

    @property
    def bridges_turns(self) -> bool:
        """Whether the family's renderer may be asked for a continuation."""
        return self._family is not None

    def render(self, conversation: Conversation) -> list[int]:
        """Return the ids of the whole conversation with the generation prompt. Raises `ApiError`.

        The family's renderer does it only for a tokenizer that comes without a template.
        """
        if self._family is not None and not self.tokenizer.has_template:
            return self._family.render(conversation.messages, tools=conversation.tools)
        return self.tokenizer.render(
            conversation.messages,
            tools=conversation.tools,
            template_arguments=conversation.template_arguments,
            add_generation_prompt=conversation.add_generation_prompt,
        )

    def render_text(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any],
    ) -> str:
        """Return the template's text with the generation prompt (see `ChatText`)."""
        return self.tokenizer.render_text(
            messages, tools=tools, template_arguments=template_arguments, add_generation_prompt=True
        )

    def shield(self, messages: Sequence[TemplateMessage]) -> tuple[list[TemplateMessage], Mapping[str, str]]:
        """Mark special tokens' texts in messages (see `ChatText`)."""
        return self.tokenizer.shield(messages)

    def encode_shielded(self, text: str, shields: Mapping[str, str]) -> list[int]:
        """Return the ids of a rendered text (see `ChatText`)."""
        return self.tokenizer.encode_shielded(text, shields)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids` (see `ChatText`)."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

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
        if self._family is not None:
            return self._family.parse(token_ids, tools=conversation.tools if with_tools else None)
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
        if completion is None or not completion.HasField("stop_string"):
            return text
        # Within the first min_tokens a stop string does not count; one that ends later does.
        spared = self.decode(token_ids[:min_tokens], skip_special_tokens=skip_special_tokens)
        start = text.find(completion.stop_string, max(0, len(spared) - len(completion.stop_string) + 1))
        return text if start < 0 else text[:start]

    def bridge_turns(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        new_messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[int] | None:
        """Return the ids that the family's renderer puts after prompt and completion; `None` where it cannot.

        What it returns is taken only if it leaves prompt and completion as they were.
        """
        if self._family is None:
            return None
        whole = self._family.bridge_turns(prompt_token_ids, completion_token_ids, new_messages, tools=tools)
        before = [*prompt_token_ids, *completion_token_ids]
        return whole[len(before) :] if whole is not None and whole[: len(before)] == before else None

    def _opens_reasoning(self, conversation: Conversation) -> bool:
        return self.tokenizer.template_mentions("<think>") and reasoning_is_open(
            self.render_text(
                conversation.messages,
                tools=conversation.tools,
                template_arguments=conversation.template_arguments,
            )
        )


def ended_by_token(completion: types_pb2.Completion) -> bool:
    """Whether a completion's last token is the one that ended it."""
    return completion.finish_reason == types_pb2.FINISH_REASON_STOP and not completion.HasField("stop_string")
