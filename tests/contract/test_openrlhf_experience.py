"""Our results in OpenRLHF's own consumer: its code, from its wheel, turns them into what it trains on.

The truth is the script that the engine played: what OpenRLHF trains on must be its tokens and log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from support.openrlhf_wheel import ImportOpenRlhf, import_openrlhf, openrlhf_directory
from support.scripted import Json, call, tokens
from support.scripted_agent import Conversation, roll_out
from tokentape_executor.openrlhf_result import openrlhf_result
from tokentape_executor.rollout import Rollout

__all__ = ["import_openrlhf", "openrlhf_directory"]

pytestmark = [
    # vLLM's and torch's own, on import; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

MAX_LENGTH = 64
PAD = 0


@dataclass
class Script:
    """Turns of an agent: what it adds to the prompt, and what the engine samples, with log-probabilities."""

    turns: list[tuple[list[int], dict[int, float]]]
    finish: str = "stop"
    placeholder: bool = False
    tokens: list[int] = field(init=False)
    logprobs: list[float | None] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.logprobs = [], []
        for new, sampled in self.turns:
            self.tokens += [*new, *sampled]
            self.logprobs += [*([None] * len(new)), *sampled.values()]

    @property
    def calls(self) -> list[Json]:
        finishes = ["stop"] * (len(self.turns) - 1) + [self.finish]
        return [
            call(tokens(*sampled, finish=finish, logprobs=[{str(token): value} for token, value in sampled.items()]))
            for (_, sampled), finish in zip(self.turns, finishes, strict=True)
        ]

    async def play(self, conversation: Conversation) -> None:
        for index, (new, _) in enumerate(self.turns):
            await conversation.say(new, after=index - 1 if index else None)

    async def result(self) -> dict[str, Any]:
        rollout = await roll_out(*self.calls, play=self.play)
        if self.placeholder:
            rollout = replace(rollout, failure="AgentFailed: boom", attempts=3)
        return result_of(rollout)

    @property
    def sampled(self) -> list[int]:
        return [token for token, logprob in zip(self.tokens, self.logprobs, strict=True) if logprob is not None]

    @property
    def values(self) -> list[float]:
        return [logprob for logprob in self.logprobs if logprob is not None]


def result_of(rollout: Rollout) -> dict[str, Any]:
    return openrlhf_result(rollout, prompt="1 + 1?", label="2")


SINGLE = Script([([11, 12, 13], {21: -0.25, 22: -1.5, 2: -0.125})])
MULTI = Script([([11], {21: -0.5, 2: -0.75}), ([31, 32], {23: -2.0}), ([33], {24: -0.0, 25: -4.0, 2: -1.0})])
CUT = Script([([11, 12], {21: -0.5, 26: -0.25})], finish="length")
PLACEHOLDER = Script([([11, 12, 13, 14, 15], {27: -3.5})], finish="length", placeholder=True)
SCRIPTS = {"single": SINGLE, "multi": MULTI, "cut": CUT, "placeholder": PLACEHOLDER}


@pytest.fixture(scope="module")
def generator(import_openrlhf: ImportOpenRlhf) -> Any:
    """OpenRLHF's `SamplesGenerator`, for its `_process_response_into_experience`."""
    module = import_openrlhf("trainer.ppo_utils.samples_generator")
    return module.SamplesGenerator(SimpleNamespace(args=None), None, None, None, [])


@pytest.mark.parametrize("name", SCRIPTS)
async def test_masks_and_logprobs_land_on_what_was_sampled(generator: Any, name: str) -> None:
    script = SCRIPTS[name]
    experience = generator._process_response_into_experience(await script.result(), max_len=MAX_LENGTH)

    assert experience.sequences.tolist() == [script.tokens]
    assert experience.attention_mask.tolist() == [[1] * len(script.tokens)]
    assert experience.action_mask.tolist() == [[int(value is not None) for value in script.logprobs[1:]]]
    assert experience.rollout_log_probs.tolist() == [[value or 0.0 for value in script.logprobs[1:]]]
    assert experience.rewards.tolist() == experience.scores.tolist() == [1.0]
    assert experience.truncated.tolist() == [script.finish == "length"]
    assert (experience.prompts, experience.labels) == (["1 + 1?"], ["2"])
    assert experience.total_length.tolist() == [len(script.tokens)]
    assert experience.info["failed"].tolist() == [float(script.placeholder)]
    assert experience.info["sampled_tokens"].tolist() == [len(script.sampled)]


async def all_experiences(generator: Any) -> list[Any]:
    return [
        generator._process_response_into_experience(await script.result(), max_len=MAX_LENGTH)
        for script in SCRIPTS.values()
    ]


def check_rows(batch: Any) -> None:
    """Every row of a padded batch trains on exactly what one script had sampled."""
    assert len(batch.sequences) == len(SCRIPTS)
    for row, script in enumerate(SCRIPTS.values()):
        mask = batch.action_mask[row].bool()
        assert batch.sequences[row, 1:][mask].tolist() == script.sampled
        assert batch.rollout_log_probs[row][mask].tolist() == script.values
        assert batch.rollout_log_probs[row][~mask].count_nonzero() == 0


async def test_a_batch_of_all_kinds_trains_on_what_was_sampled(
    generator: Any, import_openrlhf: ImportOpenRlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    algo = SimpleNamespace(advantage=SimpleNamespace(estimator="reinforce"))
    tokenizer = SimpleNamespace(pad_token_id=PAD)
    maker_type = import_openrlhf("trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    maker = maker_type(None, None, None, None, None, SimpleNamespace(args=SimpleNamespace(algo=algo)), tokenizer)
    maker.args = SimpleNamespace(
        train=SimpleNamespace(dynamic_batch_enable=False), rollout=SimpleNamespace(micro_batch_size=len(SCRIPTS))
    )
    [batch] = maker.split_rollout_samples(await all_experiences(generator))
    check_rows(batch)
    assert {key: len(values) for key, values in batch.info.items()} == dict.fromkeys(batch.info, len(SCRIPTS))

    # Through the replay buffer, which pads anew; it asks for a GPU that it does not use here.
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    buffer = import_openrlhf("trainer.ppo_utils.replay_buffer").NaiveReplayBuffer(len(SCRIPTS))
    buffer.append(batch)
    again = buffer.collate_fn([buffer[index] for index in range(len(buffer))])
    check_rows(again)
    assert again.info["failed"] == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("token_level", [True, False])
async def test_the_policy_loss_is_of_the_sampled_tokens_alone(
    generator: Any, import_openrlhf: ImportOpenRlhf, *, token_level: bool
) -> None:
    import torch  # noqa: PLC0415 - seconds

    batch_type = import_openrlhf("trainer.ppo_utils.experience").Experience
    batch = batch_type.concat_experiences(await all_experiences(generator), PAD)
    loss = import_openrlhf("models.loss").PolicyLoss(token_level_loss=token_level, is_correction_level="token")
    log_probs = batch.rollout_log_probs.clone().requires_grad_()
    # A trainer that computes exactly the engine's values: no correction, no clipping, no divergence.
    value, clipped, kl, rollout_kl, filtered = loss(
        log_probs,
        batch.rollout_log_probs,
        torch.ones_like(log_probs),
        action_mask=batch.action_mask,
        rollout_log_probs=batch.rollout_log_probs,
    )
    value.backward()

    assert torch.isfinite(value)
    assert [float(each) for each in (clipped, kl, rollout_kl, filtered)] == [0.0] * 4
    assert log_probs.grad is not None
    assert torch.equal(log_probs.grad != 0, batch.action_mask.bool())


async def test_no_group_of_results_stops_the_trainer_for_its_logs(generator: Any) -> None:
    keys = [tuple(experience.info) for experience in await all_experiences(generator)]
    assert keys == [keys[0]] * len(SCRIPTS)
