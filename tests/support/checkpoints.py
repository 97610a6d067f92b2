"""Checkpoints that differ from a model's own, for updates of its weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

Tensors: TypeAlias = "dict[str, Any]"
"""Of torch, by name."""

K_PROJECTION = "model.layers.15.self_attn.k_proj.weight"
DOWN_PROJECTION = "model.layers.9.mlp.down_proj.weight"


def write(model_directory: Path, directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Write the model's checkpoint with other tensors."""
    import safetensors.torch  # noqa: PLC0415 - imports torch

    files: Any = safetensors.torch
    directory.mkdir()
    for file in model_directory.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, directory)
    tensors = change(files.load_file(model_directory / "model.safetensors"))
    files.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def all_but_the_embedding(tensors: Tensors) -> Tensors:
    """Change every value of every tensor by 5 % or so, but leave the embedding, which is the output layer too."""
    import torch  # noqa: PLC0415

    random = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if "embed_tokens" not in name:
            noise = torch.randn(tensor.shape, generator=random)
            tensors[name] = (tensor.float() * (1 + 0.05 * noise)).to(tensor.dtype)
    return tensors


def one_of_another_shape(tensors: Tensors) -> Tensors:
    """As `all_but_the_embedding`, and a tensor in the middle lacks a row."""
    tensors = all_but_the_embedding(tensors)
    return tensors | {K_PROJECTION: tensors[K_PROJECTION][:-1].contiguous()}


def one_lacking(tensors: Tensors) -> Tensors:
    """As `all_but_the_embedding`, without a tensor in the middle."""
    return {name: tensor for name, tensor in all_but_the_embedding(tensors).items() if name != DOWN_PROJECTION}
