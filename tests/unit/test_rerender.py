"""The comparison of samples with a re-rendered conversation, on ids that can be counted by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.rerender import Drift, Rerendered, common_prefix, compare, conversation, repeated
from tokentape.v1 import types_pb2
from tokentape_executor.receipt import SplitCause
from tokentape_executor.trajectory import Action, FinishReason, Sample


def sample(tokens: Sequence[int], *ranges: tuple[int, int]) -> Sample:
    sampling = types_pb2.SamplingParameters()
    actions = [Action(start, end, index, 0, FinishReason.STOP, sampling) for index, (start, end) in enumerate(ranges)]
    logprobs = [0.0] * len(tokens)
    causes = SplitCause.NEW_CONVERSATION
    return Sample(list(tokens), actions, logprobs, [], list(range(len(ranges))), FinishReason.STOP, causes, parent=None)


SAMPLE = sample([1, 2, 10, 11, 12, 0, 3, 20, 21, 0], (2, 6), (7, 10))


@pytest.mark.parametrize(
    ("token_ids", "spans", "missing", "misplaced", "invented"),
    [
        pytest.param([1, 2, 10, 11, 12, 0, 3, 20, 21, 0], [(2, 6), (7, 10)], 0, 0, 0, id="the same"),
        pytest.param([1, 2, 10, 13, 0, 3, 20, 21, 0], [(2, 5), (6, 9)], 2, 4, 1, id="two tokens become another"),
        pytest.param([1, 2, 10, 11, 12, 0, 4, 20, 21, 0], [(2, 6), (7, 10)], 0, 3, 0, id="another tool result"),
        pytest.param([1, 2, 0, 3, 0], [(2, 3), (4, 5)], 5, 2, 0, id="nothing but terminators"),
    ],
)
def test_what_differs_is_counted(
    token_ids: list[int], spans: list[tuple[int, int]], missing: int, misplaced: int, invented: int
) -> None:
    drift = compare(SAMPLE, Rerendered(token_ids, spans))

    assert drift == Drift(7, missing, misplaced, invented, len(token_ids))
    assert drift.exact == (missing == misplaced == invented == 0)


def test_context_that_comes_again_is_counted() -> None:
    first, second = sample([1, 2, 10, 0], (2, 4)), sample([1, 2, 10, 0, 3, 20], (5, 6))
    rendered_anew = sample([1, 2, 9, 9, 0, 3, 20, 4, 30], (8, 9))

    assert repeated([first]) == 0
    assert repeated([first, second]) == 4
    assert repeated([first, second, rendered_anew]) == 4 + 5
    assert common_prefix(first.tokens, rendered_anew.tokens) == 2


def test_the_conversation_of_a_report_ends_with_the_last_answer() -> None:
    tool = {"type": "function", "name": "f", "description": "", "parameters": {"type": "object"}, "strict": True}
    call = {"type": "function_call", "name": "f", "arguments": '{"a"\r\n: 1}', "call_id": "c"}
    result = {"type": "function_call_output", "output": "one", "call_id": "c"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]}
    report = {
        "responses_create_params": {"input": [{"role": "developer", "content": "Be good."}], "tools": [tool]},
        "response": {"output": [said, call, result, call, result]},
    }

    messages, tools = conversation(report)

    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert messages == [
        {"role": "system", "content": "Be good."},
        {"role": "assistant", "content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "one"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    assert [tool["function"]["name"] for tool in tools] == ["f"]
