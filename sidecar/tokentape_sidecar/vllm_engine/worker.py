"""What the sidecar's own vLLM runs inside its workers: loading a checkpoint in place, so that a failure can be mended.

vLLM's `reload_weights` leaves a model that it failed to load in pieces: the next load fails on what is left of the last
one, and a step on the meta tensors between them ends the engine. And tensors that a checkpoint lacks keep their old
values, with a warning in a log. `WeightsExtension` puts the pieces back, and takes a lacking tensor for a failure.

Used beyond vLLM's public interface: its worker's `model_runner` and `vllm_config`, and of
`model_executor.model_loader.reload.layerwise` what `_put_back` names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

_SHOWN = 3


class WeightsExtension:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`), to be called by `collective_rpc`."""

    def tokentape_reload_weights(self, weights_path: str) -> None:
        """Load the checkpoint in `weights_path`. What raises leaves a model that can be loaded again."""
        worker = cast("Worker", self)
        model: Any = worker.model_runner.get_model()
        wanted = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        try:
            with _noting_loaded(model) as loaded:
                worker.reload_weights(weights_path=weights_path)
        except BaseException:
            _put_back(model)
            raise
        lacking = sorted(wanted.difference(*loaded)) if loaded else []
        # vLLM does not say which tensors of a quantized model it has loaded.
        if lacking and worker.vllm_config.model_config.quantization is None:
            named = ", ".join(lacking[:_SHOWN])
            raise ValueError(f"the checkpoint lacks {len(lacking)} of {len(wanted)} tensors: {named}, …")


@contextmanager
def _noting_loaded(model: Any) -> Generator[list[set[str]]]:
    """Note in the list what the model says that it has loaded; nothing for one that does not say."""
    loaded: list[set[str]] = []
    load: Callable[[Any], set[str] | None] = model.load_weights

    def load_noting(weights: Any) -> set[str] | None:
        names = load(weights)
        if names is not None:
            loaded.append(names)
        return names

    model.load_weights = load_noting
    try:
        yield loaded
    finally:
        del model.load_weights


def _put_back(model: Any) -> None:
    """Give every layer that was not loaded to its end its old tensors back, and forget what was loaded of it."""
    from vllm.model_executor.model_loader.reload import layerwise  # noqa: PLC0415 - only where something failed

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)  # pyright: ignore[reportPrivateUsage]
        info.reset()
    layerwise.LOADING_LAYERS.clear()
