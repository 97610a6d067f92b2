"""The oracle, on a real if tiny transformers model that is sampled from here by the book, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tokentape.v1 import types_pb2
from tokentape_executor.oracle import BOUNDARY_WINDOW, LogprobsMode, score, verify
from tokentape_executor.oracle_report import OracleError, SpanRefused, Tolerance, ToleranceExceeded
from tokentape_executor.receipt import SplitCause
from tokentape_executor.trajectory import Action, FinishReason, Sample, VersionSpan

if TYPE_CHECKING:
    import torch

pytestmark = [
    # torch's and transformers' own, on import; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

Sampling = types_pb2.SamplingParameters

VOCABULARY = 97
EOS = 2
TIGHT = Tolerance(largest=1e-3, mean=1e-4)


@pytest.fixture(scope="module")
def model() -> Any:
    import torch  # noqa: PLC0415 - seconds
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=EOS,
        initializer_range=0.6,
    )
    return LlamaForCausalLM(config).eval()


def next_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    import torch  # noqa: PLC0415

    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0, -1].float()


def by_the_book(logits: torch.Tensor, sampling: Sampling, position: int) -> dict[int, float]:
    """The distribution over tokens, by the parameters' definitions, as plain Python: token id to probability."""
    values = [float(value) for value in logits]
    if position < sampling.min_tokens:
        for stop in (EOS, *sampling.stop_token_ids):
            values[stop] = -math.inf
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    greedy = temperature == 0
    scaled = [value if greedy else value / temperature for value in values]
    allowed = {token_id: math.exp(value) for token_id, value in enumerate(scaled) if value > -math.inf}
    if not greedy:
        best = max(allowed.values())
        allowed = {token_id: weight for token_id, weight in allowed.items() if weight >= sampling.min_p * best}
        ranked = sorted(allowed, key=lambda token_id: -allowed[token_id])
        ranked = ranked[: sampling.top_k] if sampling.top_k > 0 else ranked
        top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
        total, reached = sum(allowed[token_id] for token_id in ranked), 0.0
        nucleus: list[int] = []
        for token_id in ranked:
            nucleus.append(token_id)
            reached += allowed[token_id] / total
            if reached >= top_p:
                break
        allowed = {token_id: allowed[token_id] for token_id in nucleus}
    total = sum(allowed.values())
    return {token_id: weight / total for token_id, weight in allowed.items()}


def sampled(
    model: Any, sampling: Sampling | None = None, *, raw: bool = False, turns: int = 2, length: int = 12
) -> Sample:
    """A sample of some turns, drawn by the parameters; the draws are made up but fixed."""
    sampling = sampling or Sampling()
    tokens: list[int] = []
    logprobs: list[float] = []
    actions: list[Action] = []
    for turn in range(turns):
        tokens += [3 + turn, 50, 51]
        logprobs += [0.0] * 3
        start = len(tokens)
        for position in range(length):
            logits = next_logits(model, tokens)
            probabilities = by_the_book(logits, sampling, position)
            candidates = sorted(probabilities, key=lambda token_id: -probabilities[token_id])
            token_id = candidates[(7 * position) % min(len(candidates), 3)]
            value = logits.log_softmax(-1)[token_id].item() if raw else math.log(probabilities[token_id])
            tokens.append(token_id)
            logprobs.append(value)
        actions.append(Action(start, len(tokens), turn, 0, FinishReason.LENGTH, sampling))
    return Sample(
        tokens=tokens,
        actions=actions,
        logprobs=logprobs,
        version_spans=[VersionSpan(action.start, action.end, "1") for action in actions],
        call_indices=list(range(turns)),
        finish_reason=FinishReason.LENGTH,
        split_cause=SplitCause.NEW_CONVERSATION,
        parent=None,
    )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(temperature=1.7),
        Sampling(temperature=0),
        Sampling(temperature=0, top_p=0.2),
        Sampling(temperature=0.8, top_k=3),
        Sampling(temperature=0.8, top_k=0, top_p=0.5),
        Sampling(temperature=0.8, top_k=-1, min_p=0.2),
        Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.01),
        Sampling(min_tokens=4, stop_token_ids=[5, 6]),
        Sampling(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, n=1, seed=7, max_tokens=12),
    ],
)
def test_what_was_sampled_by_the_parameters_verifies(model: Any, sampling: Sampling) -> None:
    report = verify([sampled(model, sampling)], model, tolerance=TIGHT)
    assert report.compared == 24
    assert report.largest < TIGHT.largest


def test_a14_raw_and_processed_log_probabilities_are_told_apart(model: Any) -> None:
    sampling = Sampling(temperature=0.5)
    raw, processed = sampled(model, sampling, raw=True), sampled(model, sampling)
    verify([raw], model, logprobs_mode=LogprobsMode.RAW, tolerance=TIGHT)
    with pytest.raises(ToleranceExceeded):
        verify([raw], model)
    with pytest.raises(ToleranceExceeded):
        verify([processed], model, logprobs_mode=LogprobsMode.RAW)


def test_the_report_has_every_position(model: Any) -> None:
    one, two = sampled(model), sampled(model, Sampling(temperature=0.5), turns=1)
    logprobs = list(two.logprobs)
    logprobs[7] -= 0.25
    report = score([one, replace(two, logprobs=logprobs)], model)

    assert [each.positions for each in report.samples] == [[*range(3, 15), *range(18, 30)], [*range(3, 15)]]
    assert report.samples[1].worst_position == 7
    assert report.largest == report.samples[1].largest == pytest.approx(0.25, abs=1e-3)
    assert report.samples[1].mean == pytest.approx(0.25 / 12, abs=1e-3)
    assert report.mean == pytest.approx(0.25 / 36, abs=1e-3)
    report.check(Tolerance(largest=0.3, mean=0.1))
    with pytest.raises(ToleranceExceeded, match=r"sample 1, position 7: .* 0\.250 from the model's, more than 0\.2"):
        report.check(Tolerance(largest=0.2, mean=0.1))
    with pytest.raises(ToleranceExceeded, match=r"sample 1: .* on average, more than 0\.01"):
        report.check(Tolerance(largest=0.3, mean=0.01))


def test_a_corrupt_token_id_is_named(model: Any) -> None:
    good = sampled(model)
    tokens = list(good.tokens)
    tokens[9] = int(next_logits(model, good.tokens[:9]).argmin())
    with pytest.raises(ToleranceExceeded, match="sample 1, position 9: "):
        verify([good, replace(good, tokens=tokens)], model)


def test_log_probabilities_shifted_by_one_are_named(model: Any) -> None:
    good = sampled(model)
    logprobs = list(good.logprobs)
    logprobs[3:15] = [*logprobs[4:15], logprobs[3]]
    with pytest.raises(ToleranceExceeded, match=r"sample 0, position [3-9]: "):
        verify([replace(good, logprobs=logprobs)], model)


def test_a_token_that_top_p_leaves_out_is_far_off(model: Any) -> None:
    """Just outside, kernels may differ; far outside, nothing excuses it."""
    sampling = Sampling(top_p=0.3)
    good = sampled(model, sampling, turns=1)
    tokens = list(good.tokens)
    tokens[-1] = int(next_logits(model, tokens[:-1]).argmin())
    with pytest.raises(ToleranceExceeded, match=f"position {len(tokens) - 1}: "):
        verify([replace(good, tokens=tokens)], model)


def test_an_id_that_the_model_does_not_have_is_named(model: Any) -> None:
    good = sampled(model)
    tokens = [*good.tokens[:-1], VOCABULARY]
    with pytest.raises(OracleError, match=f"sample 0, position {len(tokens) - 1}: the model has no token {VOCABULARY}"):
        verify([replace(good, tokens=tokens)], model)


def with_spans(sample: Sample, *spans: VersionSpan) -> Sample:
    return replace(sample, version_spans=list(spans))


def test_tokens_sampled_on_a_stale_cache_are_refused(model: Any) -> None:
    good = sampled(model, turns=1)
    stale = with_spans(good, VersionSpan(3, 6, "1"), VersionSpan(6, 15, "1", stale_cache=True))
    with pytest.raises(SpanRefused, match="sample 0, positions 6 to 14: sampled on a cache of earlier weights"):
        verify([stale], model)

    report = verify([stale], model, skip_refused=True)
    assert (report.compared, len(report.refusals)) == (3, 1)
    assert report.samples[0].positions == [3, 4, 5]


def test_tokens_of_other_weights_are_refused_unless_told(model: Any) -> None:
    good = sampled(model, turns=1)
    mixed = with_spans(good, VersionSpan(3, 6, "1"), VersionSpan(6, 15, "2"))
    with pytest.raises(OracleError, match=r"weight versions \['1', '2'\]; say which"):
        verify([mixed], model)
    with pytest.raises(SpanRefused, match="positions 3 to 5: of weight version '1', which is not the model's"):
        verify([mixed], model, weight_versions=["2"])
    assert verify([mixed], model, weight_versions=["2"], skip_refused=True).compared == 9
    assert verify([mixed], model, weight_versions=["1", "2"]).compared == 12


def test_tokens_of_an_adapter_are_refused_unless_told(model: Any) -> None:
    good = sampled(model, turns=1)
    adapted = replace(good, lora_name="math")
    with pytest.raises(SpanRefused, match="of the LoRA adapter 'math', which is not the model's"):
        verify([adapted], model)
    with pytest.raises(SpanRefused, match="of the LoRA adapter '', which is not the model's"):
        verify([good], model, lora_name="math")
    assert verify([adapted], model, lora_name="math").compared == 12


def test_tokens_near_an_uncertain_boundary_are_refused(model: Any) -> None:
    good = sampled(model, turns=1, length=30)
    boundary = 20
    uncertain = with_spans(good, VersionSpan(3, boundary, "1"), VersionSpan(boundary, 33, "2", boundary_uncertain=True))
    report = verify([uncertain], model, weight_versions=["1", "2"], skip_refused=True)
    near = range(boundary - BOUNDARY_WINDOW, boundary + BOUNDARY_WINDOW)
    assert report.samples[0].positions == [position for position in range(3, 33) if position not in near]
    assert str(report.refusals[0]) == (
        f"sample 0, positions {near.start} to {near.stop - 1}: near an uncertain boundary between weight versions"
    )


def test_an_uncertain_boundary_does_not_reach_into_another_call(model: Any) -> None:
    good = sampled(model)
    uncertain = with_spans(good, VersionSpan(3, 15, "1"), VersionSpan(18, 30, "1", boundary_uncertain=True))
    report = verify([uncertain], model, skip_refused=True)
    assert report.samples[0].positions == [*range(3, 15), *range(18 + BOUNDARY_WINDOW, 30)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(presence_penalty=0.5),
        Sampling(frequency_penalty=-0.5),
        Sampling(repetition_penalty=1.1),
        Sampling(logit_bias={5: 1.0}),
        Sampling(bad_words=["no"]),
        Sampling(allowed_token_ids=[1, 2]),
    ],
)
def test_what_cannot_be_recomputed_is_refused_by_name_but_not_for_raw_values(model: Any, sampling: Sampling) -> None:
    ((field, _),) = sampling.ListFields()
    raw = sampled(model, raw=True)
    raw = replace(raw, actions=[replace(action, sampling=sampling) for action in raw.actions])
    with pytest.raises(SpanRefused, match=f"sample 0, positions 3 to 14: {field.name}: "):
        verify([raw], model)
    with pytest.raises(OracleError, match="no token could be compared"):
        verify([raw], model, skip_refused=True)
    verify([raw], model, logprobs_mode=LogprobsMode.RAW, tolerance=TIGHT)


@pytest.mark.parametrize("mode", LogprobsMode)
def test_structured_output_is_refused_without_a_tokenizer(model: Any, mode: LogprobsMode) -> None:
    good = sampled(model, Sampling(structured_output=types_pb2.StructuredOutput(regex="[a-z]+")))
    with pytest.raises(SpanRefused, match="structured output: its masks need the model's tokenizer"):
        verify([good], model, logprobs_mode=mode)


def test_nothing_to_compare_is_an_error(model: Any) -> None:
    with pytest.raises(OracleError, match="no token could be compared"):
        verify([], model)
