"""The oracle: re-scores a rollout's samples with transformers, and says whether the engine's log-probabilities hold.

A token's difference is |its recorded log-probability - that of a forward pass over the sample's own tokens|, under the
parameters that the tape recorded for its call. Ids that are shifted, lost or swapped, values of neighbours, and prompts
that the engine never had all show as differences of whole nats; another precision or kernel shows as hundredths.

What cannot be compared is *refused*, which is an error unless refused tokens are to be skipped:

- tokens sampled on a stale cache: they are of no one version of the weights;
- tokens within `BOUNDARY_WINDOW` of an uncertain boundary between versions, on either side;
- tokens of a version of the weights, or of a LoRA adapter, that the model is not said to have;
- in processed mode, calls with penalties, `logit_bias`, `bad_words` or `allowed_token_ids`;
- calls with structured output, unless a tokenizer is given to recompute its masks with. That is so in raw mode too:
  vLLM applies them before it takes log-probabilities of either mode.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tokentape_executor._distribution import processed, refusal
from tokentape_executor._grammar import GrammarError, Grammars
from tokentape_executor.oracle_report import (
    DEFAULT_TOLERANCE,
    OracleError,
    OracleReport,
    Refusal,
    SampleReport,
    SpanRefused,
    Tolerance,
)
from tokentape_executor.trajectory import Action, Sample, VersionSpan

BOUNDARY_WINDOW = 8
"""Tokens on either side of an uncertain boundary between versions that are not vouched for."""


class LogprobsMode(enum.StrEnum):
    """Which distribution the recorded log-probabilities are of; `tokentape.v1.LogprobsMode` by its names."""

    RAW = "raw"
    PROCESSED = "processed"


def verify(
    samples: Sequence[Sample],
    model: Any,
    *,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    skip_refused: bool = False,
    logprobs_mode: LogprobsMode = LogprobsMode.PROCESSED,
    weight_versions: Collection[str] | None = None,
    lora_name: str = "",
    tokenizer: Any = None,
    stop_token_ids: Collection[int] | None = None,
) -> OracleReport:
    """Re-score `samples` and return how far the recorded log-probabilities are from the model's.

    The parameters are those of `score`. Raises `ToleranceExceeded`, naming sample and position, where they are beyond
    `tolerance`; `SpanRefused` where tokens cannot be compared, unless `skip_refused`; `OracleError` where none can.
    """
    report = score(
        samples,
        model,
        logprobs_mode=logprobs_mode,
        weight_versions=weight_versions,
        lora_name=lora_name,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
    )
    if report.refusals and not skip_refused:
        raise SpanRefused(str(report.refusals[0]))
    if not report.compared:
        raise OracleError("no token could be compared")
    report.check(tolerance)
    return report


def score(
    samples: Sequence[Sample],
    model: Any,
    *,
    logprobs_mode: LogprobsMode = LogprobsMode.PROCESSED,
    weight_versions: Collection[str] | None = None,
    lora_name: str = "",
    tokenizer: Any = None,
    stop_token_ids: Collection[int] | None = None,
) -> OracleReport:
    """Re-score `samples`, one forward pass each, and return all differences, whatever they are.

    `model`: a causal language model of transformers, in any precision, on any device. `logprobs_mode`: what the tape's
    log-probabilities are of; GetModel says. `weight_versions`: the recorded versions that are the model's weights;
    `None`: the one that the samples have. `lora_name`: the LoRA adapter that is merged into the model.
    `tokenizer`: the model's, of transformers, for structured output.
    `stop_token_ids`: the ids that end a completion by themselves, as GetModel's `eos_token_ids`; `None`: those of the
    model's configuration. Raises `OracleError` where the samples have several versions and it was not said which is the
    model's, or ids that the model does not have.
    """
    seen = sorted({span.weight_version for sample in samples for span in sample.version_spans})
    if weight_versions is None and len(seen) > 1:
        raise OracleError(f"the samples have the weight versions {seen}; say which the model has")
    scorer = _Scorer(
        model,
        LogprobsMode(logprobs_mode),
        seen if weight_versions is None else weight_versions,
        tokenizer,
        _eos_token_ids(model) if stop_token_ids is None else frozenset(stop_token_ids),
        lora_name=lora_name,
    )
    return OracleReport([scorer.score(index, sample) for index, sample in enumerate(samples)])


class _Scorer:
    """A model, and what it is compared under."""

    def __init__(
        self,
        model: Any,
        mode: LogprobsMode,
        weight_versions: Collection[str],
        tokenizer: Any,
        stop_token_ids: frozenset[int],
        *,
        lora_name: str,
    ) -> None:
        self._model = model
        self._mode = mode
        self._weight_versions = weight_versions
        self._lora_name = lora_name
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._vocabulary_size = int(model.get_output_embeddings().weight.shape[0])
        self._grammars: Grammars | None = None

    def score(self, index: int, sample: Sample) -> SampleReport:
        """Compare one sample."""
        import torch  # noqa: PLC0415 - seconds, and an optional dependency

        for position, token_id in enumerate(sample.tokens):
            if token_id >= self._vocabulary_size:
                raise OracleError(f"sample {index}, position {position}: the model has no token {token_id}")
        refusals = [Refusal(index, start, end, reason) for start, end, reason in self._refused_spans(sample)]
        differences: dict[int, float] = {}
        with torch.no_grad():
            for action, logits in zip(sample.actions, self._logits(sample), strict=True):
                try:
                    expected = self._logprobs(sample, action, logits)
                except GrammarError as error:
                    refusals.append(Refusal(index, action.start, action.end, str(error)))
                    continue
                recorded = torch.tensor(sample.logprobs[action.start : action.end], dtype=torch.float32)
                values = (recorded - expected.cpu()).abs().tolist()
                differences |= zip(range(action.start, action.end), values, strict=True)
        refused = {position for each in refusals for position in range(each.start, each.end)}
        positions = [position for position in differences if position not in refused]
        return SampleReport(index, positions, [differences[position] for position in positions], refusals)

    def _logits(self, sample: Sample) -> Iterator[Any]:
        """Yield, per action, the float32 logits that predict its tokens: one row of the vocabulary's size for each."""
        import torch  # noqa: PLC0415

        rows = [position - 1 for action in sample.actions for position in range(action.start, action.end)]
        device = self._model.device
        tokens = torch.tensor([sample.tokens], device=device)
        keep = torch.tensor(rows, device=device)
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            logits = self._model(tokens, logits_to_keep=keep, use_cache=False).logits[0]
        else:
            logits = self._model(tokens, use_cache=False).logits[0, keep]
        for block in logits.split([action.end - action.start for action in sample.actions]):
            yield block.float()

    def _logprobs(self, sample: Sample, action: Action, logits: Any) -> Any:
        """Return the log-probabilities of an action's tokens, float32. Raises `GrammarError`."""
        import torch  # noqa: PLC0415

        token_ids = sample.tokens[action.start : action.end]
        sampled = torch.tensor(token_ids, device=logits.device)
        stops = self._stop_token_ids.union(action.sampling.stop_token_ids)
        if action.sampling.HasField("structured_output"):
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer, self._vocabulary_size)
            logits = self._grammars.mask(logits, token_ids, action.sampling.structured_output, stops)
        if self._mode is LogprobsMode.PROCESSED:
            logits = processed(logits, sampled, action.sampling, stops)
        return logits.log_softmax(-1).gather(-1, sampled[:, None])[:, 0]

    def _refused_spans(self, sample: Sample) -> Iterator[tuple[int, int, str]]:
        """Yield start, end and reason of what cannot be compared, but for grammars that turn out not to work."""
        for action in sample.actions:
            if sample.lora_name != self._lora_name:
                yield action.start, action.end, f"of the LoRA adapter {sample.lora_name!r}, which is not the model's"
            name = refusal(action.sampling) if self._mode is LogprobsMode.PROCESSED else None
            if name is not None:
                yield action.start, action.end, f"{name}: its distribution is not recomputed here"
        previous: VersionSpan | None = None
        starts = {action.start for action in sample.actions}
        for span in sample.version_spans:
            if span.stale_cache:
                yield span.start, span.end, "sampled on a cache of earlier weights"
            if span.weight_version not in self._weight_versions:
                yield span.start, span.end, f"of weight version {span.weight_version!r}, which is not the model's"
            if span.boundary_uncertain:
                before = 0 if previous is None or span.start in starts else previous.end - previous.start
                yield (
                    span.start - min(before, BOUNDARY_WINDOW),
                    min(span.end, span.start + BOUNDARY_WINDOW),
                    "near an uncertain boundary between weight versions",
                )
            previous = span


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Return the ids that end a completion by the model's configuration."""
    found: set[int] = set()
    for config in (model.config, model.generation_config):
        ids: int | Sequence[int] | None = config.eos_token_id if config is not None else None
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)
