"""D01: a backlog is read in pieces that a message can hold, top log-probabilities counted."""

from __future__ import annotations

from support.records import record, runs_of
from tokentape_sidecar.call_reader import CallReader
from tokentape_sidecar.choice_record import Completion, TokenRun
from tokentape_sidecar.engine import FinishReason, Sampling, TopLogprobs
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.tape import Tape, TapeLimits, TapePolicy, TokensSampled

K = 20
"""Top log-probabilities of a token."""


def sample(call: CallRecord, count: int) -> None:
    top = TopLogprobs(K, list(range(K)) * count, [-1.0] * (K * count))
    call.append(0, list(range(count)), [-0.5] * count, top_logprobs=top)


def tape_with(count: int) -> Tape:
    tape = Tape("main." + "0" * 32, TapeLimits(), TapePolicy())
    call = CallRecord(call_id="call-1", prompt_suffix=[1], sampling=Sampling(n=1, top_logprobs=K), listener=tape)
    tape.add_call(call)
    sample(call, count)
    return tape


def test_a_page_of_a_tape_counts_top_logprobs_D01() -> None:
    tape = tape_with(1000)
    position = 0
    values: list[int] = []
    while position < tape.end_sequence:
        entries, end = tape.read(position, 2100)
        assert end > position
        runs = [entry.run for entry in entries if isinstance(entry, TokensSampled)]
        values.append(sum(len(run.token_ids) * (1 + K) for run in runs))
        position = end
    assert max(values) <= 2100
    assert sum(values) == 1000 * (1 + K)


def test_a_page_has_one_token_at_least_D01() -> None:
    tape = tape_with(3)
    ends = [0]
    while ends[-1] < tape.end_sequence:
        ends.append(tape.read(ends[-1], 5)[1])
    assert ends == [0, 2, 3, 4], "the first has the start of the call, too"


def test_a_reader_takes_a_long_backlog_in_pieces_and_its_end_last_D01() -> None:
    call = record(top_logprobs=K)
    count = 3 * CallReader.MAX_VALUES // (1 + K)
    sample(call, count)
    call.finish(0, FinishReason.LENGTH)
    reader = CallReader(call)
    reads: list[list[TokenRun | Completion]] = []
    while not reader.at_end:
        reads.append(reader.read_new())
    runs = [run for read in reads for run in runs_of(read)]
    assert len(reads) > 2
    assert max(len(run.token_ids) for run in runs) * (1 + K) <= CallReader.MAX_VALUES
    assert [token_id for run in runs for token_id in run.token_ids] == list(range(count))
    assert [isinstance(event, Completion) for read in reads for event in read].index(True) == len(runs)
    assert reader.read_new() == []
