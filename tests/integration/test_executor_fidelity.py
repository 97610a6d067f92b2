"""How rollouts go wrong elsewhere (FIDELITY.md, cases/open.md), played to the executor over a real scripted sidecar.

Numbers after f in the tests' names are FIDELITY.md's failure modes, those after a and e the cases'.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer

from support.scripted import call, scripted_sidecar, tokens
from support.scripted_agent import END, Agent, Conversation, Play, Sampling, roll_out
from support.sidecar_client import Generated
from tokentape.v1 import generation_pb2, types_pb2
from tokentape_executor.errors import NothingSampled
from tokentape_executor.openrlhf_result import openrlhf_result
from tokentape_executor.receipt import DropReason, SplitCause
from tokentape_executor.sampling_policy import sampling_policy
from tokentape_executor.trajectory import FinishReason

GLUE = [198, 1]
"""What a template puts after a turn: a newline, and the next turn's beginning."""


async def test_e01_f1_ids_that_do_not_survive_re_encoding_are_kept_in_both_turns(model_directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    split = [843, 15439]
    assert tokenizer.encode(tokenizer.decode(split), add_special_tokens=False).ids != split
    feedback = [*GLUE, *tokenizer.encode("ok", add_special_tokens=False).ids]
    prompt = [5, 6]

    async def play(agent: Conversation) -> None:
        await agent.say(prompt)
        await agent.say(feedback, after=0)

    rollout = await roll_out(
        call(tokens(*split, END), expect=prompt),
        call(tokens(*split, END), expect=[*prompt, *split, END, *feedback]),
        play=play,
    )
    result = openrlhf_result(rollout, prompt="?", label="5")
    assert result["observation_tokens"] == [*prompt, *split, END, *feedback, *split, END]
    assert result["action_ranges"] == [(2, 5), (5 + len(feedback), 8 + len(feedback))]
    assert result["extra_logs"]["splits"] == 0


@pytest.mark.parametrize(
    ("cause", "rewritten"),
    [
        (types_pb2.SPLIT_CAUSE_TEMPLATE_STRIPS_REASONING, [5, 6, 12, END, 7]),
        (types_pb2.SPLIT_CAUSE_HISTORY_EDITED, [5, 99, 7]),
    ],
)
async def test_e03_f5_a_rewritten_history_begins_a_sample_and_is_counted(
    cause: types_pb2.SplitCause.ValueType, rewritten: list[int]
) -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5, 6], cause=types_pb2.SPLIT_CAUSE_NEW_CONVERSATION)
        await agent.say(rewritten, cause=cause)
        await agent.say([8], after=1)

    rollout = await roll_out(
        call(tokens(10, 11, 12, END)), call(tokens(20, END), expect=rewritten), call(tokens(30, END)), play=play
    )
    before, after = rollout.trajectory.samples
    assert (before.tokens, before.action_ranges) == ([5, 6, 10, 11, 12, END], [(2, 6)])
    count = len(rewritten)
    assert after.tokens == [*rewritten, 20, END, 8, 30, END]
    assert after.action_ranges == [(count, count + 2), (count + 3, count + 5)]
    name = types_pb2.SplitCause.Name(cause).removeprefix("SPLIT_CAUSE_").lower()
    assert rollout.trajectory.receipt.splits == {SplitCause.NEW_CONVERSATION: 1, SplitCause(name): 1}
    logs = openrlhf_result(rollout, prompt="?", label="5")["extra_logs"]
    assert (logs["samples"], logs["splits"], logs["other_sampled_tokens"]) == (2, 1, 4)


@pytest.mark.parametrize(
    ("case", "finishes", "agent_says", "truncated"),
    [
        ("the last turn met a limit", ("stop", "length"), False, True),
        ("the agent ran out of context", ("stop", "stop"), True, True),
        ("an earlier turn met a limit", ("length", "stop"), False, False),
        ("all ended well", ("stop", "stop"), False, False),
    ],
)
async def test_e05_one_flag_says_whether_a_limit_ended_the_rollout(
    case: str, finishes: tuple[str, str], *, agent_says: bool, truncated: bool
) -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5])
        await agent.say([6], after=0)

    rollout = await roll_out(*(call(tokens(10, finish=finish)) for finish in finishes), play=play, truncated=agent_says)
    assert openrlhf_result(rollout, prompt="?", label="5")["truncated"] is truncated, case


async def test_e05_a_context_that_is_filled_exactly_is_truncation_and_one_more_call_is_refused() -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5, 6])
        with pytest.raises(grpc.aio.AioRpcError, match="context") as refused:
            await agent.say([7], after=0)
        assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE

    rollout = await roll_out(call(tokens(*range(10, 30))), play=play, limit=12)
    (sample,) = rollout.trajectory.samples
    assert (len(sample.tokens), sample.truncated) == (12, True)
    assert rollout.trajectory.receipt.calls == 1


@pytest.mark.parametrize("feedback", [8, 9])
async def test_e05_feedback_that_leaves_no_room_is_truncation_where_the_agent_says_so(feedback: int) -> None:
    """The turn before it ended well, so that the tape alone cannot know whether the agent wanted to go on."""

    async def play(agent: Conversation) -> None:
        await agent.say([5, 6])
        with pytest.raises(grpc.aio.AioRpcError, match="context length is 12 tokens") as refused:
            await agent.say([7] * feedback, after=0)
        assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE

    rollout = await roll_out(call(tokens(10, END)), play=play, limit=12, truncated=True)
    result = openrlhf_result(rollout, prompt="?", label="5")
    assert (result["observation_tokens"], result["action_ranges"]) == ([5, 6, 10, END], [(2, 4)])
    assert result["truncated"] is True
    assert rollout.trajectory.samples[0].truncated is False


async def test_e05_feedback_that_leaves_room_for_one_token_is_truncation_by_the_tape() -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5, 6])
        await agent.say([7] * 7, after=0)

    rollout = await roll_out(call(tokens(10, END)), call(tokens(20, 21, END)), play=play, limit=12)
    result = openrlhf_result(rollout, prompt="?", label="5")
    assert result["observation_tokens"] == [5, 6, 10, END, *[7] * 7, 20]
    assert result["action_ranges"] == [(2, 4), (11, 12)]
    assert result["truncated"] is True


class TrainersParameters:
    """Like vLLM's; one object for all rollouts."""

    def __init__(self) -> None:
        self.temperature, self.top_p, self.max_tokens, self.stop, self.logprobs = 0.5, 1.0, 30, ["END"], 1


async def test_e07_parameters_shared_by_concurrent_rollouts_stay_as_they_are() -> None:
    params, max_length = TrainersParameters(), 40
    as_given = copy.deepcopy(vars(params))

    def play(length: int) -> Play:
        async def three_turns(agent: Conversation) -> None:
            await agent.say(range(5, 5 + length))
            await agent.say([6, 7], after=0)
            # What the trainer's parameters leave open is each rollout's own.
            await agent.say([8], after=1, sampling=Sampling(temperature=2.0, max_tokens=10_000, top_k=length))

        return three_turns

    async with scripted_sidecar(call(tokens(10, 11, END)), repeat=True, eos_token_ids=[END]) as running:
        rollouts = await asyncio.gather(
            *(
                Agent(running, play(length)).rollout(
                    {}, sampling_policy=sampling_policy(params), max_context_tokens=max_length
                )
                for length in range(1, 9)
            )
        )
    assert vars(params) == as_given
    for length, rollout in enumerate(rollouts, 1):
        (sample,) = rollout.trajectory.samples
        assert len(sample.tokens) == length + 3 + 2 + 3 + 1 + 3
        for action in sample.actions:
            assert action.sampling.max_tokens == min(params.max_tokens, max_length - action.start)
            assert (action.sampling.temperature, list(action.sampling.stop)) == (0.5, ["END"])
        assert [action.sampling.top_k for action in sample.actions if action.sampling.HasField("top_k")] == [length]


async def test_e11_an_empty_completion_leaves_nothing_to_train_on() -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5])

    rollout = await roll_out(call(tokens(finish="stop")), play=play)
    assert (rollout.trajectory.samples, rollout.trajectory.receipt.calls) == ([], 1)
    with pytest.raises(NothingSampled, match="no token to train on in 1 calls"):
        openrlhf_result(rollout, prompt="?", label="5")


async def test_e11_a_first_prompt_without_room_is_nothing_to_train_on() -> None:
    """NeMo Gym takes the refusal for an empty completion and ends in order."""

    async def play(agent: Conversation) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="context length"):
            await agent.say(range(5, 17))

    rollout = await roll_out(call(tokens(10, END)), play=play, limit=12, truncated=True)
    assert (rollout.trajectory.samples, rollout.trajectory.receipt.calls) == ([], 0)
    with pytest.raises(NothingSampled, match="no token to train on in 0 calls"):
        openrlhf_result(rollout, prompt="?", label="5")


async def test_e11_an_empty_turn_in_the_middle_is_no_range() -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5])
        await agent.say([6], after=0)
        await agent.say([7], after=1)

    rollout = await roll_out(
        call(tokens(10, END)), call(tokens(finish="stop")), call(tokens(20, END), expect=[5, 10, END, 6, 7]), play=play
    )
    (sample,) = rollout.trajectory.samples
    assert (sample.tokens, sample.action_ranges) == ([5, 10, END, 6, 7, 20, END], [(1, 3), (5, 7)])


async def test_e11_f13_a_lone_end_token_is_one_action() -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5])

    (sample,) = (await roll_out(call(tokens(END, logprobs=[{str(END): -0.75}])), play=play)).trajectory.samples
    assert (sample.tokens, sample.action_ranges, sample.logprobs) == ([5, END], [(1, 2)], [0.0, -0.75])


@pytest.mark.parametrize("reverse", [False, True])
async def test_a01_f26_the_sampled_tokens_own_value_is_taken_in_any_order(*, reverse: bool) -> None:
    rows = [{"13": -0.75, "42": -4.25}, {"7": -0.125, "9": -3.0}]
    ordered = [dict(reversed(row.items())) if reverse else row for row in rows]

    async def play(agent: Conversation) -> None:
        await agent.say([5])

    (sample,) = (await roll_out(call(tokens(42, 7, finish="stop", logprobs=ordered)), play=play)).trajectory.samples
    assert sample.logprobs == [0.0, -4.25, -0.125]


@pytest.mark.parametrize("row", [{"13": -0.5}, {"42": "NaN"}, {"42": "-Infinity"}])
async def test_a01_f26_a_missing_or_unusable_value_fails_that_call_and_is_never_zero(row: dict[str, object]) -> None:
    async def play(agent: Conversation) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="log-probabilit"):
            await agent.say([5])
        await agent.say([6])

    rollout = await roll_out(
        call(tokens(41, 42, finish="stop", logprobs=[{"41": -0.25}, row])), call(tokens(20, END)), play=play
    )
    (sample,) = rollout.trajectory.samples
    assert sample.tokens == [6, 20, END]
    assert rollout.trajectory.receipt.dropped[DropReason.FAILED] == 1


async def test_a12_tokens_that_come_with_the_end_are_kept_once() -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5])
        await agent.say([6], after=0, sampling=Sampling(max_tokens=1))

    rollout = await roll_out(call(tokens(10), tokens(11, 12, finish="stop")), call(tokens(20, 21)), play=play)
    (sample,) = rollout.trajectory.samples
    assert (sample.tokens, sample.action_ranges) == ([5, 10, 11, 12, 6, 20], [(1, 4), (5, 6)])
    assert sample.finish_reason is FinishReason.LENGTH


async def test_a13_f18_choices_stay_apart_however_their_steps_are_interleaved() -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5], sampling=Sampling(n=2))
        await agent.say([6], after=0, choice=1)

    steps = [tokens(10), tokens(20, choice=1), tokens(21, choice=1, finish="stop"), tokens(11, finish="length")]
    first, second = (await roll_out(call(*steps), call(tokens(30, END)), play=play)).trajectory.samples
    assert (first.tokens, first.action_ranges) == ([5, 10, 11], [(1, 3)])
    assert (second.tokens, second.action_ranges) == ([5, 20, 21, 6, 30, END], [(1, 3), (4, 6)])


async def test_f12_the_ids_of_a_stop_string_stay_in_the_action() -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5], sampling=Sampling(stop=["END"]))

    (sample,) = (await roll_out(call(tokens(97, *b"END", 98)), play=play)).trajectory.samples
    assert (sample.tokens, sample.finish_reason) == ([5, 97, *b"END"], FinishReason.STOP)


async def test_f14_f23_template_glue_and_what_the_harness_writes_is_observation() -> None:
    harness_writes = [300, 301]

    async def play(agent: Conversation) -> None:
        await agent.say([5])
        await agent.say([*GLUE, *harness_writes, *GLUE, 6], after=0)

    (sample,) = (await roll_out(call(tokens(10, END)), call(tokens(20, END)), play=play)).trajectory.samples
    actions = [sample.tokens[start:end] for start, end in sample.action_ranges]
    assert actions == [[10, END], [20, END]]
    assert sample.logprobs[3:10] == [0.0] * 7


async def test_f28_weights_that_change_in_mid_generation_mark_the_tokens_and_lose_none() -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5])

    steps = [tokens(10, 11, weight_version="1"), tokens(12, weight_version="2"), tokens(END, weight_version="2")]
    rollout = await roll_out(call(*steps), play=play)
    (sample,) = rollout.trajectory.samples
    assert [(span.start, span.end, span.weight_version) for span in sample.version_spans] == [(1, 3, "1"), (3, 5, "2")]
    assert rollout.trajectory.receipt.weight_versions == ("1", "2")


async def test_a_call_that_still_runs_when_the_agent_has_ended_is_abandoned() -> None:
    async def play(agent: Conversation) -> None:
        await agent.say([5])
        request = generation_pb2.GenerateRequest(prompt_token_ids=[6], tape_id=agent.tape_id)
        stream = agent.client.generation.Generate(request)
        while not (await stream.read()).HasField("delta"):  # pyright: ignore[reportAttributeAccessIssue] # no EOF yet
            pass
        agent.got.append(Generated())

    rollout = await roll_out(
        call(tokens(10, END)), call(tokens(20, 21), {"token_ids": [22], "delay_ms": 60_000}), play=play
    )
    (sample,) = rollout.trajectory.samples
    assert sample.tokens == [5, 10, END]
    assert rollout.trajectory.receipt.dropped[DropReason.ABANDONED] == 2
