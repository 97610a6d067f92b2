"""Takes the Rust front end out of the vLLM wheel in a directory, and removes the wheel.

    python -m bench.unpack_rust .cache/bench-rust

What it leaves there is `vllm/vllm-rs`, to be run by `bench.gpu --rust`.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

_MEMBER = "vllm/vllm-rs"


def main() -> None:
    directory = Path(sys.argv[1])
    (wheel,) = directory.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(_MEMBER, directory)
    (directory / _MEMBER).chmod(0o755)
    wheel.unlink()


if __name__ == "__main__":
    main()
