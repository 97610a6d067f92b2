"""OpenRLHF's engine actor in a local Ray, on a CPU.

The actor is the wheel's own `RolloutRayActor`, with its own methods. Only what OpenRLHF needs a GPU for is replaced:
the trainer broadcasts weights by NCCL to its worker extension's `update_weight`; here the same calls have the workers
load a checkpoint from a directory (`CheckpointWeights`). Below it stands a recorder that knows, without anything of
ours, which weights sampled each token.
"""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

from support.real_engine import CPU_ENVIRONMENT

CHECKPOINT = "TEST_NEXT_CHECKPOINT"
"""Names a file with the directory of the checkpoint that the next update loads."""

PARAMETERS = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight")
"""Names for some calls of `update_weight`, of which OpenRLHF makes one for each of a model's."""


Recorded = tuple[dict[str, list[tuple[int, int]]], list[Any]]


class CheckpointWeights:
    """In place of OpenRLHF's `WorkerWrap`: vLLM mixes it into its worker."""

    def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        """Load the next checkpoint, all of it with the last parameter (that empties the cache)."""
        del name, dtype, shape
        if empty_cache:
            worker: Any = self
            worker.reload_weights(weights_path=Path(os.environ[CHECKPOINT]).read_text())


def environment(openrlhf_directory: Path, checkpoint_file: Path, log_directory: Path) -> dict[str, str]:
    """Return the environment variables of the actors' processes."""
    return {
        **CPU_ENVIRONMENT,
        "PYTHONPATH": f"{openrlhf_directory}:{Path(__file__).parents[1]}",
        CHECKPOINT: str(checkpoint_file),
        "TOKENTAPE_LOG_DIR": str(log_directory),
        "PYTHONWARNINGS": "ignore",
    }


def actor_options(model_directory: Path, agent_file: Path) -> dict[str, Any]:
    """Return what `create_vllm_engines` gives the actor, as far as a CPU has it."""
    return {
        "model": str(model_directory),
        "enforce_eager": True,
        "worker_extension_cls": "support.ray_actors.CheckpointWeights",
        "tensor_parallel_size": 1,
        "distributed_executor_backend": "uni",
        "max_model_len": 1024,
        "enable_prefix_caching": True,
        "dtype": "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "num_gpus": 0,
        "agent_func_path": str(agent_file),
    }


_Actor: Any = object
"""OpenRLHF's actor, which `engine_actor` puts there."""


class Recorder(_Actor):
    """Counts the updates that generation has been resumed after; notes the count with every token."""

    async def __init__(self, **options: Any) -> None:
        await super().__init__(**options)
        self.updates = 0
        self.updated = False
        self.emitted: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._record(self.llm.output_processor)

    def _record(self, output_processor: Any) -> None:
        process_outputs = output_processor.process_outputs

        def recording(outputs: list[Any], *args: Any, **options: Any) -> Any:
            for output in outputs:
                self.emitted[output.request_id] += [(token, self.updates) for token in output.new_token_ids]
            return process_outputs(outputs, *args, **options)

        output_processor.process_outputs = recording

    def _sampling_again(self) -> None:
        self.updates += self.updated
        self.updated = False

    async def update_weight(self, *args: Any, **options: Any) -> Any:
        self.updated = True
        return cast("Any", await super().update_weight(*args, **options))

    async def resume_generation(self) -> None:
        self._sampling_again()
        await super().resume_generation()

    async def wake_up(self, tags: Any = None) -> None:
        if tags is None or "kv_cache" in tags:
            self._sampling_again()
        await super().wake_up(tags)

    async def recorded(self) -> Recorded:
        """Return each request's tokens, each with the number of updates before it; and the rollouts' trajectories."""
        return dict(self.emitted), self.executor.trajectories

    async def shutdown_executor(self) -> None:
        """End what the executor has started."""
        self.executor.shutdown()


def engine_actor() -> Any:
    """Return OpenRLHF's actor class, for Ray, with the recorder."""
    import ray  # noqa: PLC0415 - seconds

    rollout_actor: Any = importlib.import_module("openrlhf.trainer.ray.vllm_engine").RolloutRayActor
    return ray.remote(type("RecordedActor", (Recorder, rollout_actor.__ray_metadata__.modified_class), {}))
