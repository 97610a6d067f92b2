"""The code blocks of a README, and a place to run them in as a reader would."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text, and the heading that it stands under."""

    language: str
    text: str
    heading: str


def blocks(readme: Path, heading: str, language: str) -> list[str]:
    """Return the text of the blocks in `language` below `heading`, in order; there is at least one."""
    found = [block.text for block in _blocks(readme) if (block.heading, block.language) == (heading, language)]
    assert found, f"{readme} has no {language} block below {heading!r}"
    return found


def _blocks(readme: Path) -> list[Block]:
    found: list[Block] = []
    heading = ""
    tokens = MarkdownIt().parse(readme.read_text())
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open":
            assert following is not None
            heading = following.content
        elif token.type == "fence":
            found.append(Block(token.info.strip(), token.content, heading))
    return found


class Reader:
    """Somebody who pastes a README's blocks into one shell, in a checkout whose `out` is empty."""

    def __init__(self, checkout: Path, directory: Path, ports: Mapping[int, int]) -> None:
        """Use ports of this machine's choice: `ports` maps the README's to free ones.

        The sidecar's own default, 50051, is one of them, though the README does not spell it where it starts one.
        """
        self.directory = directory
        self._ports = ports
        for entry in checkout.iterdir():
            if entry.name != "out":
                (directory / entry.name).symlink_to(entry)
        (directory / "out").mkdir()

    def paste(self, *texts: str, seconds: float) -> str:
        """Run `texts` one after the other and return what they wrote. Each command must succeed.

        What they have left running is sent SIGTERM in the end, and must end by that.
        """
        end = "trap 'kill $(jobs -p) 2>/dev/null || true; wait || true' EXIT"
        script = "\n".join(["set -euo pipefail", end, *texts])
        script = script.replace("tokentape-sidecar --model", "tokentape-sidecar --listen 127.0.0.1:50051 --model")
        for told, used in self._ports.items():
            script = script.replace(f":{told}", f":{used}")
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode == 0, f"status {process.returncode}:\n{output}"
        return output


def without_missing_tools(texts: list[str]) -> list[str]:
    """Leave out blocks of grpcurl where that is not installed; everything else must be."""
    return [text for text in texts if not text.startswith("grpcurl") or shutil.which("grpcurl")]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
