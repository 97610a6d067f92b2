"""Where checkpoints may be loaded from: below one directory, and nowhere else."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from tokentape_sidecar.errors import InvalidArgument, NotFound


def checkpoint_directory(root: Path, directory: str) -> Path:
    """Return the real path of `directory`, which is relative to `root` and stays below it, its files too.

    Raises `InvalidArgument` where it does not, by its words or by a symbolic link; `NotFound` where it does not exist.
    """
    path = PurePosixPath(directory)
    if path.is_absolute() or ".." in path.parts or "\0" in directory or not path.parts:
        raise InvalidArgument("directory", "must be the path of a directory below the weights root, relative to it")
    real_root = root.resolve()
    real = (real_root / path).resolve()
    for inside in (real, *_files(real)):
        if real_root not in inside.resolve().parents:
            raise InvalidArgument("directory", f"{inside.name} is a link that leads out of the weights root")
    if not real.is_dir():
        raise NotFound(f"directory: there is no directory {directory!r} below the weights root")
    return real


def _files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
