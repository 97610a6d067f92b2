"""OpenRLHF's own code: its wheel, fetched once, checked against its hash, and kept under `.cache/openrlhf`.

What it imports that is not here, and that no test runs, is stood in for by modules whose every name is an empty class.
"""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

VERSION = "0.11.2"
SHA256 = "94486a29b7f0c2e9d9f7dec266af23ed5c51c70046258d1c38e4721c5d08b05b"
_PIP_SECONDS = 120

_ABSENT = (
    "deepspeed.runtime.zero.partition_parameters",
    "flash_attn.bert_padding",
    "flash_attn.utils.distributed",
    "peft.tuners.lora",
    "pylatexenc",
    "torchdata.stateful_dataloader",
)
_STAND_IN = '''"""Stands in for a package that is not here: every name in it is an empty class."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''


def fetch(cache: Path) -> Path:
    """Return the directory to import `openrlhf` from, with what stands in for its absent requirements."""
    names = hashlib.sha256(" ".join(_ABSENT).encode()).hexdigest()
    directory = cache / f"{VERSION}-{names[:8]}"
    if directory.exists():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        [wheel] = _download(Path(work))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        assert digest == SHA256, f"{wheel.name} is not what it was: sha256 {digest}"
        site = Path(work) / "site"
        with zipfile.ZipFile(wheel) as files:
            files.extractall(work)
        # Not the wheel's `tests`, which it would install beside it.
        (Path(work) / f"openrlhf-{VERSION}.data" / "purelib" / "openrlhf").rename(_made(site) / "openrlhf")
        for name in _ABSENT:
            _stand_in(site, name)
        try:
            # All or nothing, also where several runs fetch it at once.
            site.rename(directory)
        except OSError:
            if not directory.exists():
                raise
    return directory


def _download(target: Path) -> list[Path]:
    """Fetch the wheel, which is pure Python, although tagged for one Python and platform."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", f"openrlhf=={VERSION}", "--no-deps", "--dest", str(target)),
            *("--python-version", "3.12", "--platform", "manylinux1_x86_64", "--only-binary", ":all:", "--quiet"),
        ],
        check=True,
        capture_output=True,
        timeout=_PIP_SECONDS,
    )
    return list(target.glob("*.whl"))


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def _stand_in(site: Path, name: str) -> None:
    """Write the package `name` and those around it, unless they are there already."""
    package = site
    for part in name.split("."):
        package = _made(package / part)
        (package / "__init__.py").write_text(_STAND_IN)


ImportOpenRlhf = Callable[[str], ModuleType]


@pytest.fixture(scope="session")
def openrlhf_directory(checkout: Path) -> Path:
    """What to put on Python's path for `import openrlhf`."""
    return fetch(checkout / ".cache" / "openrlhf")


@pytest.fixture(scope="module")
def import_openrlhf(openrlhf_directory: Path) -> Iterator[ImportOpenRlhf]:
    """Import a module of OpenRLHF's (`import_openrlhf("utils.agent")`); at the end, none of them is imported."""

    def load(name: str) -> ModuleType:
        with warnings.catch_warnings():
            # OpenRLHF's, vLLM's and torch's own, on import; not ours to mend.
            warnings.simplefilter("ignore")
            return importlib.import_module(f"openrlhf.{name}")

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(openrlhf_directory))
        yield load
    ours = ("openrlhf", *(name.split(".")[0] for name in _ABSENT))
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]
