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
from tokentape_bridge.answer_parser import AnswerParser, parse_answer, reasoning_is_open
from tokentape_bridge.answer_stream import AnswerStream, ParsedText, WholeAnswer
from tokentape_bridge.answers import Answer
from tokentape_bridge.errors import ApiError
from tokentape_bridge.families import Family
from tokentape_bridge.text_stream import TextOptions, TextStream, before_stop_string, completion_text
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
            if conversation.continue_final_message:
                field = "continue_final_message"
                raise ApiError(f"{field}: needs a chat template", param=field, code="unsupported_parameter")
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
            continue_final_message=conversation.continue_final_message,
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
            return replace(answer, content=before_stop_string(answer.content, completion))
        options = TextOptions(skip_special_tokens=skip_special_tokens, min_tokens=min_tokens)
        text = completion_text(self.tokenizer, token_ids, completion, options)
        return parse_answer(
            text,
            with_tools=with_tools,
            with_reasoning=self._reads_reasoning,
            reasoning_is_open=self._reads_reasoning and self._opens_reasoning(conversation),
        )

    def answer_streams(
        self, conversation: Conversation, count: int, *, with_tools: bool, options: TextOptions
    ) -> list[AnswerStream]:
        """Return what reads `count` completions, sampled after `conversation`, as they come.

        Each says what `parse` does. A family's code wants a completion as a whole, and is given it in the end.
        `options.stop_token_ids` are those that the request adds to the model's.
        """
        if self.family is not None:
            # Nothing of `options` but the stop string, which the completion names, means anything to a family.
            def parse(token_ids: Sequence[int], completion: types_pb2.Completion) -> Answer:
                return self.parse(token_ids, completion, conversation, with_tools=with_tools)

            return [WholeAnswer(parse) for _ in range(count)]
        options = replace(options, stop_token_ids=options.stop_token_ids | self._stop_token_ids)
        is_open = self._reads_reasoning and self._opens_reasoning(conversation)
        return [
            ParsedText(
                TextStream(self.tokenizer, options),
                AnswerParser(
                    with_tools=with_tools and bool(conversation.tools),
                    with_reasoning=self._reads_reasoning,
                    reasoning_is_open=is_open,
                ),
            )
            for _ in range(count)
        ]

    def _opens_reasoning(self, conversation: Conversation) -> bool:
        return self.tokenizer.template_mentions("<think>") and reasoning_is_open(
            self.render_text(
                conversation.messages,
                tools=conversation.tools,
                template_arguments=conversation.template_arguments,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
            )
        )
