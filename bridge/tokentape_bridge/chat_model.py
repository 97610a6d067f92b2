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
        keep_reasoning: bool = False,
    ) -> None:
        """`stop_token_ids` are the model's terminators, `family` its renderer.

        `reads_reasoning`: whether `<think>` is taken for reasoning, or left in the content. `keep_reasoning`: whether
        sampled reasoning stays in prompts where the template would leave it out.
        """
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(stop_token_ids)
        self.keep_reasoning = keep_reasoning
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
        """Return the ids of the whole conversation with the generation prompt. Raises `ApiError`."""
        return self.tokenizer.render(
            conversation.messages,
            tools=conversation.tools,
            template_arguments=conversation.template_arguments,
            add_generation_prompt=True,
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
    ) -> Answer:
        """Return what a completion says that was sampled after `conversation`.

        `completion` is how it ended, `None` if it has not. Tool calls are read if `with_tools` and there are tools.
        """
        with_tools = with_tools and bool(conversation.tools)
        if self._family is not None:
            return self._family.parse(token_ids, tools=conversation.tools if with_tools else None)
        text = self.text_of(token_ids, completion)
        return parse_answer(
            text,
            with_tools=with_tools,
            with_reasoning=self._reads_reasoning,
            reasoning_is_open="</think>" in text and self._opens_reasoning(conversation),
        )

    def text_of(self, token_ids: Sequence[int], completion: types_pb2.Completion | None) -> str:
        """Return a completion's text without the stop token, or what follows a stop string's beginning."""
        if completion is None:
            return self.decode(token_ids, skip_special_tokens=True)
        text = self.decode(token_ids[:-1] if ended_by_token(completion) else token_ids, skip_special_tokens=True)
        return text.partition(completion.stop_string)[0] if completion.HasField("stop_string") else text

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
        return reasoning_is_open(
            self.render_text(
                conversation.messages,
                tools=conversation.tools,
                template_arguments=conversation.template_arguments,
            )
        )


def ended_by_token(completion: types_pb2.Completion) -> bool:
    """Whether a completion's last token is the one that ended it."""
    return completion.finish_reason == types_pb2.FINISH_REASON_STOP and not completion.HasField("stop_string")
