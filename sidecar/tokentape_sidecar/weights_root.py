"""Where checkpoints may be loaded from: below one directory, and nowhere else."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from tokentape_sidecar.errors import InvalidArgument, NotFound

_SHOWN = 200


def checkpoint_directory(root: Path, directory: str) -> Path:
    """Return the real path of `directory`, which is relative to `root` and stays below it, its files too.

    Raises `InvalidArgument` where it does not, by its words or by a symbolic link; `NotFound` where it does not exist,
    cannot be looked at, or holds what is neither a file nor a directory: who reads a pipe waits for ever.
    """
    path = PurePosixPath(directory)
    if path.is_absolute() or ".." in path.parts or "\0" in directory or not path.parts:
        raise InvalidArgument("directory", "must be the path of a directory below the weights root, relative to it")
    try:
        return _below(root.resolve(), path)
    except (OSError, RuntimeError) as error:
        # Of links that go round in circles pathlib says RuntimeError.
        reason = (error.strerror if isinstance(error, OSError) else None) or "its links go round in circles"
        raise NotFound(f"directory: {directory[:_SHOWN]!r} cannot be looked at: {reason}") from None


def _below(root: Path, path: PurePosixPath) -> Path:
    real = (root / path).resolve()
    files = _files(real)
    for inside in (real, *files):
        if root not in inside.resolve().parents:
            raise InvalidArgument("directory", f"{inside.name} is a link that leads out of the weights root")
    if not real.is_dir():
        raise NotFound(f"directory: there is no directory {str(path)[:_SHOWN]!r} below the weights root")
    for file in files:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise NotFound(f"directory: {file.name} is neither a file nor a directory")
    return real


def _files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
