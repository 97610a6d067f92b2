"""The calls of a page that tells each one twice, for `grpcurl` and for `buf curl`: are they the same, do they work?

A page's block has commands of one tool or of both; other commands stand between them. `assert_same_calls` reads them as
a shell would and compares what each would ask of whom; `told_with` leaves out one tool's commands, so that the page can
be run with the other.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

Tool: TypeAlias = Literal["grpcurl", "buf"]
TOOLS: tuple[Tool, Tool] = ("grpcurl", "buf")
_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
TOOLS_HERE: list[Tool] = [tool for tool in TOOLS if shutil.which(tool, path=_PATH)]
"""Those that are installed: buf always is; grpcurl comes from no package registry."""

_PUNCTUATION = "();<>|&\n"
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(.*?)^\2$", re.DOTALL | re.MULTILINE)
_STANDARD_INPUT = {"@", "@-"}
_TLS_FILES = {"cacert", "cert", "key"}
_SAID_TWICE = {"protocol", "http2-prior-knowledge", "plaintext", "expand-headers", "reflect-header"}
"""Options that say how each tool is to speak gRPC, and nothing about the call."""


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """What one command asks, of whom, and as whom."""

    tool: Tool = field(compare=False)
    address: str
    """`HOST:PORT`, or `unix:PATH`."""
    tls: bool
    method: str
    """`package.Service/Method`; `list` for a list of what is there, `describe NAME` for a declaration."""
    data: object
    """The request's JSON; `None` where there is none, the shell's text where it is not written out in the command."""
    headers: tuple[str, ...]
    """Sorted; names in lower case."""
    files: tuple[tuple[str, str], ...]
    """TLS files, by option, sorted."""


def assert_same_calls(*texts: str) -> list[GrpcCall]:
    """Check that `grpcurl` and `buf curl` make the same calls in these blocks, in the same order, and return them.

    `grpcurl … describe` has no counterpart and is left out. There is at least one call.
    """
    made = [call for text in texts for call in calls_in(text) if not call.method.startswith("describe")]
    by_grpcurl, by_buf = ([call for call in made if call.tool == tool] for tool in TOOLS)
    assert by_grpcurl, f"there is no call in {texts}"
    for first, second in zip(by_grpcurl, by_buf, strict=False):
        assert first == second
    assert len(by_grpcurl) == len(by_buf), f"{by_grpcurl}\n{by_buf}"
    return by_grpcurl


def calls_in(text: str) -> list[GrpcCall]:
    """Return the calls of a block, in order."""
    commands = list(_commands(text))
    return [_read(words, given) for words, given in commands if _tool_of(words)]


def told_with(tool: Tool, texts: Iterable[str]) -> list[str]:
    """Return the blocks that `tool` is told in, and those with no call, without the commands of the other tool."""
    kept: list[str] = []
    for text in texts:
        tools = {call.tool for call in calls_in(text)}
        if not tools:
            kept.append(text)
        elif tool in tools:
            kept.append("".join(line for line in _logical_lines(text) if _is_for(tool, line)))
    return kept


def _is_for(tool: Tool, line: str) -> bool:
    return all(call.tool == tool for call in calls_in(line))


def _commands(text: str) -> Iterator[tuple[list[str], str | None]]:
    """Yield each simple command's words, and what a here-document or here-string gives it."""
    text = _HEREDOC.sub(lambda found: f"<<< {shlex.quote(found[4])}{found[3]}\n", text.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    words: list[str] = []
    given: str | None = None
    tokens = iter(lexer)
    for token in tokens:
        if token == "<<<":
            given = next(tokens)
        elif set(token) <= set(_PUNCTUATION):
            yield words, given
            words, given = [], None
        else:
            words.append(token)
    yield words, given


def _tool_of(words: Sequence[str]) -> Tool | None:
    """Return the tool that these words run, if any; variables and `timeout S` may stand before it."""
    rest = _without_prefix(words)
    if rest[:1] == ["grpcurl"]:
        return "grpcurl"
    return "buf" if rest[:2] == ["buf", "curl"] else None


def _without_prefix(words: Sequence[str]) -> list[str]:
    rest = list(words)
    while rest and re.match(r"\w+=", rest[0]):
        rest.pop(0)
    return rest[2:] if rest[:1] == ["timeout"] else rest


def _read(words: Sequence[str], given: str | None) -> GrpcCall:
    if _tool_of(words) == "grpcurl":
        return _read_grpcurl(_without_prefix(words)[1:], given)
    return _read_buf(_without_prefix(words)[2:], given)


def _read_grpcurl(words: Sequence[str], given: str | None) -> GrpcCall:
    flags = {"plaintext", "unix", "expand-headers", "insecure", "emit-defaults"}
    options, rest = _options(words, flags)
    address, method = rest[0], " ".join(rest[1:])
    return _call(
        "grpcurl",
        address=f"unix:{address}" if "unix" in options else address,
        tls="plaintext" not in options,
        method="list" if rest[1] == "list" else re.sub(r"^([\w.]+)\.(\w+)$", r"\1/\2", method),
        options=options,
        given=given,
    )


def _read_buf(words: Sequence[str], given: str | None) -> GrpcCall:
    flags = {"http2-prior-knowledge", "list-methods", "list-services", "insecure", "emit-defaults"}
    options, rest = _options(words, flags)
    (url,) = rest
    parts = urlsplit(url)
    socket = options.get("unix-socket", [""])[0]
    method = parts.path.removeprefix("/")
    if options.keys() & {"list-services", "list-methods"}:
        method = "list"
    assert options.get("protocol") == ["grpc"], f"buf curl speaks gRPC only with --protocol grpc: {words}"
    assert parts.scheme == "https" or "http2-prior-knowledge" in options, f"needs --http2-prior-knowledge: {words}"
    return _call(
        "buf",
        address=f"unix:{socket}" if socket else parts.netloc,
        tls=parts.scheme == "https",
        method=method,
        options=options,
        given=given,
    )


def _call(
    tool: Tool, *, address: str, tls: bool, method: str, options: dict[str, list[str]], given: str | None
) -> GrpcCall:
    known = {
        "d",
        "data",
        "H",
        "header",
        "unix",
        "unix-socket",
        "list-services",
        "list-methods",
        "emit-defaults",
        "servername",
    }
    unknown = options.keys() - known - _TLS_FILES - _SAID_TWICE
    assert not unknown, f"these options are not compared, teach curls.py: {unknown}"
    return GrpcCall(
        tool,
        address=address,
        tls=tls,
        method=method,
        data=_data([*options.get("d", []), *options.get("data", [])], given),
        headers=tuple(sorted(_header(text) for name in ("H", "header") for text in options.get(name, []))),
        files=tuple((name, options[name][0]) for name in sorted(_TLS_FILES & options.keys())),
    )


def _options(words: Sequence[str], flags: set[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the options' values by name, a flag's being "", and the other words."""
    options: dict[str, list[str]] = {}
    rest: list[str] = []
    following = iter(words)
    for word in following:
        if not word.startswith("-"):
            rest.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        options.setdefault(name, []).append("" if name in flags else value if equals else next(following))
    return options, rest


def _data(texts: Sequence[str], given: str | None) -> object:
    if not texts:
        return None
    (text,) = texts
    if text in _STANDARD_INPUT:
        if given is None:
            return "standard input"
        text = given
    try:
        return json.loads(text)
    except ValueError:
        # A variable outside of strings, as in {"from_sequence": $NEXT}.
        return " ".join(text.split())


def _header(text: str) -> str:
    name, _, value = text.partition(":")
    return f"{name.strip().lower()}: {re.sub(r'[{}]', '', value).strip()}"


def _logical_lines(text: str) -> Iterator[str]:
    """Yield the lines of a script, those together that are one command: continued, quoted, or with a here-document."""
    pending = ""
    for line in text.splitlines(keepends=True):
        pending += line
        if not _is_open(pending):
            yield pending
            pending = ""
    yield pending


def _is_open(text: str) -> bool:
    if text.endswith("\\\n"):
        return True
    without = _HEREDOC.sub(" ", text)
    if re.search(r"<<-?\s*['\"]?\w", without.replace("<<<", "")):
        return True
    try:
        words = shlex.split(without, comments=True)
    except ValueError:
        return True
    return " ".join(words).count("$(") > " ".join(words).count(")")
