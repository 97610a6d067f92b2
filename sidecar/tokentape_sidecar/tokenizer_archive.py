"""A model's tokenizer as one archive: plain data files, never code."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from tokentape_sidecar.errors import NotFound

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "config.json",
    "generation_config.json",
)
"""The files that make a tokenizer, whichever of them a model has. `config.json` tells transformers its kind."""


def pack_tokenizer(directory: Path) -> bytes:
    """Return a gzip-compressed tar of the tokenizer's files in `directory`, the same bytes for the same files.

    Raises `NotFound` where the directory has none.
    """
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not any(file.name.startswith(("tokenizer", "vocab", "tiktoken", "tekken")) for file in files):
        raise NotFound(f"there is no tokenizer in {directory}")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in files:
            content = file.read_bytes()
            entry = tarfile.TarInfo(file.name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), compresslevel=6, mtime=0)
