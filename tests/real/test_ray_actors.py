"""Two of OpenRLHF's engine actors on one machine: real Ray, real vLLM (CPU), one real NeMo Gym, weights that change.

The driver is OpenRLHF's own `SamplesGenerator`; the actors are OpenRLHF's own, see `support/ray_actors.py` for the one
thing that is not. What a tape says of versions is compared, token by token, with what a recorder below our adapter saw,
and with the log-probabilities that the two checkpoints give.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from support import ray_actors, recording_agent
from support.marked import Marked, marked
from support.openrlhf_wheel import ImportOpenRlhf, import_openrlhf, openrlhf_directory
from tokentape_executor.oracle import verify
from tokentape_executor.oracle_report import Tolerance, ToleranceExceeded
from tokentape_executor.trajectory import Sample

__all__ = ["import_openrlhf", "marked", "openrlhf_directory"]

pytestmark = [
    pytest.mark.timeout(600),  # two engines, one after the other, and Gym, on a machine that may be busy
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    # Ray leaves it the logs of its processes when it ends.
    pytest.mark.filterwarnings("ignore:unclosed file <_io.:ResourceWarning"),
]

LONG, SHORT = 96, 24
"""Most tokens of a completion: enough that an update falls into it, and few."""
QUESTIONS = {"What is 2 + 3?": "5", "What is 10 - 4?": "6"}
SAMPLES = 2
"""Rollouts of each question; OpenRLHF sends each question to the least busy actor."""
OLD, NEW = {"", "2"}, {"1"}
"""The versions that are the first checkpoint's weights, and the other's."""

TOLERANCE = Tolerance(mean=0.1)
"""Samples are short, so that their means scatter: up to 0.061 was seen."""

Experiences = list[Any]


@dataclass
class Cluster:
    """A local Ray, and what it takes to drive the actors in it as OpenRLHF does."""

    ray: Any
    actors: list[Any]
    tokenizer: Any
    samples_generator: Any
    call_all: Any
    checkpoint_file: Path
    temporary: Path
    """The actors' directory for temporary files."""

    def generator(self, *, enable_sleep: bool = False) -> Any:
        """OpenRLHF's, over the questions."""
        args = SimpleNamespace(
            rollout=SimpleNamespace(batch_size=len(QUESTIONS), n_samples_per_prompt=SAMPLES),
            algo=SimpleNamespace(
                dynamic_filtering_enable=False, advantage=SimpleNamespace(is_correction_level="token")
            ),
            vllm=SimpleNamespace(enable_sleep=enable_sleep),
        )
        batch = ("", list(QUESTIONS), list(QUESTIONS.values()), [None] * len(QUESTIONS))
        return self.samples_generator(SimpleNamespace(args=args), [batch], None, self.tokenizer, self.actors)

    def options(self, tokens: int) -> dict[str, Any]:
        """What OpenRLHF passes on of its arguments."""
        sampling = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": tokens, "min_new_tokens": tokens}
        return {**sampling, "max_len": 512, "n_samples_per_prompt": SAMPLES}

    def broadcast(self, checkpoint: Path) -> None:
        """OpenRLHF's `ActorPPOTrainer.broadcast_to_vllm`: caches are cleared first, then come the parameters."""
        self.checkpoint_file.write_text(str(checkpoint))
        resets = [actor.reset_prefix_cache.remote() for actor in self.actors]
        for name in ray_actors.PARAMETERS:
            last = name == ray_actors.PARAMETERS[-1]
            self.call_all(self.actors, "update_weight", name, dtype=None, shape=None, empty_cache=last)
        self.ray.get(resets)

    def recorded(self) -> list[ray_actors.Recorded]:
        """Of each actor."""
        return self.ray.get([actor.recorded.remote() for actor in self.actors])


@pytest.fixture(scope="module")
def changed_model(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that differs in all but the embedding, whose tied half vLLM's CPU engine does not reload.

    Little noise everywhere, and a flatter distribution: much noise makes a model that magnifies bfloat16's rounding.
    """
    import torch  # noqa: PLC0415 - seconds
    from safetensors import torch as safetensors  # noqa: PLC0415

    directory = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(model_directory, directory)
    [file] = directory.glob("*.safetensors")
    random = torch.Generator().manual_seed(4)
    weights: dict[str, Any] = safetensors.load_file(file)
    for name, weight in weights.items():
        if "embed_tokens" not in name:
            noise = torch.randn(weight.shape, generator=random)
            weights[name] = (weight.float() * (1 + 0.02 * noise)).to(weight.dtype)
    weights["model.norm.weight"] *= 0.6
    safetensors.save_file(weights, file, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def cluster(
    marked: Marked,
    openrlhf_directory: Path,
    import_openrlhf: ImportOpenRlhf,
    model_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """Two actors, started one after the other; asleep, as `create_vllm_engines` leaves them."""
    import ray  # noqa: PLC0415 - seconds
    from transformers import AutoTokenizer  # noqa: PLC0415

    module = import_openrlhf("trainer.ray.vllm_engine")
    actors: list[Any] = []
    auto_tokenizer: Any = AutoTokenizer
    directory = tmp_path_factory.mktemp("ray")
    variables = ray_actors.environment(openrlhf_directory, directory / "checkpoint", directory / "logs")
    with (
        # Short names, for sockets.
        tempfile.TemporaryDirectory(prefix="tt-ray-", dir="/tmp") as ray_directory,
        tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as temporary,
        pytest.MonkeyPatch.context() as patch,
    ):
        # Otherwise Ray kills actors when others use the machine's memory, and gives way to all others.
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {**variables, "TMPDIR": temporary}},
            _temp_dir=ray_directory,
        )
        try:
            for _ in range(2):
                options = ray_actors.actor_options(model_directory, Path(recording_agent.__file__))
                actors.append(ray_actors.engine_actor().options(num_cpus=1).remote(**options))
                ray.get(actors[-1].get_num_unfinished_requests.remote())
            module.batch_vllm_engine_call(actors, "sleep")
            yield Cluster(
                ray,
                actors,
                auto_tokenizer.from_pretrained(str(model_directory)),
                import_openrlhf("trainer.ppo_utils.samples_generator").SamplesGenerator,
                module.batch_vllm_engine_call,
                directory / "checkpoint",
                Path(temporary),
            )
        finally:
            ray.shutdown()


def check_trained_tokens(experiences: Experiences, recorded: Sequence[ray_actors.Recorded]) -> None:
    """Every experience trains on one request's tokens, as the engine's core emitted them."""
    assert len(experiences) == SAMPLES * len(QUESTIONS)
    emitted = [[token for token, _ in request] for requests, _ in recorded for request in requests.values()]
    for experience in experiences:
        assert experience.sequences[0, 1:][experience.action_mask[0].bool()].tolist() in emitted
        assert experience.info["failed"].tolist() == [0.0]


def test_rollouts_on_both_actors_share_one_gym(cluster: Cluster, marked: Marked) -> None:
    # OpenRLHF wakes the engines for this, and lets them sleep after it.
    experiences, *_ = cluster.generator(enable_sleep=True).generate_samples(**cluster.options(SHORT))

    recorded = cluster.recorded()
    check_trained_tokens(experiences, recorded)
    assert [len(trajectories) for _, trajectories in recorded] == [SAMPLES, SAMPLES]
    assert len(marked.processes("tokentape_executor.node.keeper")) == 1
    assert len(marked.processes("tokentape.console import bridge")) == 2  # with its leash
    assert len(marked.processes("bin/gym env start")) == 2


def test_weights_that_change_while_the_engines_sleep(cluster: Cluster, changed_model: Path) -> None:
    # As OpenRLHF's `PPOTrainer.broadcast_to_vllm` in hybrid mode: only the weights are woken.
    cluster.call_all(cluster.actors, "wake_up", tags=["weights"])
    cluster.broadcast(changed_model)
    experiences, *_ = cluster.generator(enable_sleep=True).generate_samples(**cluster.options(SHORT))

    check_trained_tokens(experiences, cluster.recorded())
    assert {experience.info["weight_versions"].item() for experience in experiences} == {1.0}


def test_weights_that_change_during_rollouts(cluster: Cluster, model_directory: Path) -> None:
    # As OpenRLHF's `PPOTrainerAsync` with partial rollouts.
    cluster.call_all(cluster.actors, "wake_up")
    generator, options = cluster.generator(), cluster.options(LONG)
    before = [len(requests) for requests, _ in cluster.recorded()]
    refs = generator._dispatch_prompts_to_vllm(list(QUESTIONS), list(QUESTIONS.values()), **options)
    wait_until(lambda: all(map(well_under_way, cluster.recorded(), before)))
    cluster.call_all(cluster.actors, "pause_generation")
    cluster.broadcast(model_directory)
    cluster.call_all(cluster.actors, "resume_generation")
    responses = [response for ref in refs for response in cluster.ray.get(ref)]
    experiences = [generator._process_response_into_experience(response, **options) for response in responses]

    check_trained_tokens(experiences, cluster.recorded())
    assert {experience.info["weight_versions"].item() for experience in experiences} == {2.0}


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def well_under_way(recorded: ray_actors.Recorded, before: int) -> bool:
    """Whether the actor's rollouts have sampled something, each."""
    requests = list(recorded[0].values())[before:]
    return len(requests) == SAMPLES and all(len(request) > SHORT // 4 for request in requests)


def all_samples(cluster: Cluster) -> list[Sample]:
    return [sample for _, trajectories in cluster.recorded() for each in trajectories for sample in each.samples]


def versions_of(sample: Sample) -> list[str]:
    """Of each sampled token."""
    return [span.weight_version for span in sample.version_spans for _ in range(span.start, span.end)]


def test_every_token_has_the_version_that_the_engine_had(cluster: Cluster) -> None:
    samples = all_samples(cluster)
    assert len(samples) == 3 * SAMPLES * len(QUESTIONS)
    emitted = [request for requests, _ in cluster.recorded() for request in requests.values()]
    seen = {tuple(token for token, _ in each): [str(updates or "") for _, updates in each] for each in emitted}
    for sample in samples:
        tokens = tuple(token for start, end in sample.action_ranges for token in sample.tokens[start:end])
        assert versions_of(sample) == seen[tokens]
        # Generation was paused around each update, and the cache cleared.
        assert not any(span.boundary_uncertain or span.stale_cache for span in sample.version_spans)
    assert {tuple(dict.fromkeys(versions_of(sample))) for sample in samples} == {("",), ("1",), ("1", "2")}


def test_every_token_has_the_log_probability_that_its_version_gives_it(
    cluster: Cluster, model_directory: Path, changed_model: Path
) -> None:
    samples = one_of_each(all_samples(cluster))
    versions = [version for sample in samples for version in versions_of(sample)]
    for directory, ours in ((model_directory, OLD), (changed_model, NEW)):
        model = load_model(directory)
        report = verify(samples, model, tolerance=TOLERANCE, weight_versions=ours, skip_refused=True)
        assert report.compared == sum(version in ours for version in versions)
        # By the other weights they are others.
        with pytest.raises(ToleranceExceeded):
            verify(samples, model, tolerance=TOLERANCE, weight_versions=(OLD | NEW) - ours, skip_refused=True)


def one_of_each(samples: list[Sample]) -> list[Sample]:
    """One sample of each succession of versions: a forward pass takes long on a busy machine."""
    return list({tuple(dict.fromkeys(versions_of(sample))): sample for sample in samples}.values())


def load_model(directory: Path) -> Any:
    import torch  # noqa: PLC0415 - seconds
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.bfloat16)


def test_an_actor_that_is_killed_leaves_the_other_working(cluster: Cluster, marked: Marked) -> None:
    killed = cluster.actors.pop(0)
    cluster.ray.kill(killed)
    generator = cluster.generator()
    experiences, *_ = generator.generate_samples(**cluster.options(SHORT))

    check_trained_tokens(experiences, cluster.recorded())
    assert len(marked.processes("bin/gym env start")) == 2


def test_after_the_last_actor_nothing_is_left(cluster: Cluster, marked: Marked) -> None:
    ours = marked.processes("tokentape", "gym")
    assert ours
    assert list(cluster.temporary.glob("tokentape-*"))
    cluster.ray.kill(cluster.actors.pop())
    assert psutil.wait_procs(ours, timeout=20)[1] == []
    cluster.ray.shutdown()
    wait_until(lambda: not marked.processes())
    # What vLLM leaves there when it is killed is not ours.
    assert [path for path in cluster.temporary.iterdir() if path.name.startswith(("tokentape-", "tt-"))] == []
