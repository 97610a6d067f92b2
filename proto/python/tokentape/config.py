"""Options from a file: `--config FILE`.

The file is TOML, and its keys are the long options without their dashes. The command line wins: an option given there
hides the file's, also one that may be repeated. Relative paths are those of the working directory, as on the command
line.

    listen = "127.0.0.1:50051"           # --listen 127.0.0.1:50051
    no-continuation = true               # --no-continuation; false is as if it were not there
    sidecar = ["a=127.0.0.1:50051"]      # an option that may be repeated
    sidecar = {a = "127.0.0.1:50051"}    # the same: NAME=VALUE as a table
    vllm = {dtype = "bfloat16"}          # what follows -- on the command line: --dtype bfloat16; or a list of words
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

from typing_extensions import override

from tokentape.secret_file import reason_of

_Value: TypeAlias = "bool | str | int | float | list[Any] | dict[str, Any]"

_NOT_IN_FILES = ("help", "version", "config")
_PASSED_ON = "vllm"


class ConfigurableParser(argparse.ArgumentParser):
    """An `ArgumentParser` with `--config` and `--version`. Options are not abbreviated.

    Call `with_config` on the arguments before anything else reads them.
    """

    def __init__(self, *, passes_on: bool = False, **settings: Any) -> None:
        """`passes_on`: what follows `--` is vLLM's, and may be in the file too; `settings` are `ArgumentParser`'s."""
        super().__init__(allow_abbrev=False, **settings)
        self._passes_on = passes_on
        self._place = ""
        self.add_argument("--version", action="version", version=f"tokentape {version('tokentape')}")
        self.add_argument(
            "--config",
            type=Path,
            metavar="FILE",
            help="take options from FILE as well (TOML; the keys are the long options without --"
            f"{', and ' + _PASSED_ON + ' for what follows --' if passes_on else ''}); the command line wins",
        )

    def with_config(self, arguments: Sequence[str]) -> list[str]:
        """Return `arguments` with those of the file that they name before them; they stand for the file from then on.

        Exits with status 2 and a message that names file and key, where it cannot be read, or a key or value is wrong.
        """
        own, passed_on = split_at_dashes(arguments)
        file, own = _take_file(self, own)
        if file is None:
            return list(arguments)
        content = self._read(file)
        told_words = self._words_to_pass(file, content.pop(_PASSED_ON, [])) if self._passes_on else []
        told = [word for key, value in content.items() for word in self._words_of(file, key, value, own)]
        words = [*told_words, *(passed_on or [])]
        return [*told, *own, *(["--", *words] if words or passed_on is not None else [])]

    @override
    def error(self, message: str) -> NoReturn:
        super().error(f"{self._place}{message}")

    def _read(self, file: Path) -> dict[str, _Value]:
        try:
            return tomllib.loads(file.read_text())
        except (OSError, UnicodeDecodeError) as error:
            self.error(f"--config: {file} cannot be read: {reason_of(error)}")
        except tomllib.TOMLDecodeError as error:
            self.error(f"--config: {file} is not TOML: {error}")

    def _words_of(self, file: Path, key: str, value: _Value, own: Sequence[str]) -> list[str]:
        """Return the arguments that `key` stands for, checked; none where the command line has that option."""
        option = f"--{key}"
        action = self._option_string_actions.get(option)
        if action is None or key in _NOT_IN_FILES:
            self.error(f"{file}: there is no option {option} for the key {key!r}")
        try:
            words = list(_options(option, value, action))
        except TypeError as error:
            self.error(f"{file}: {key}: {error}")
        self._place = f"{file}: {key}: "
        super().parse_known_args(words)
        self._place = ""
        hidden = any(word.partition("=")[0] in action.option_strings for word in own)
        return [] if hidden else words

    def _words_to_pass(self, file: Path, value: _Value) -> list[str]:
        if isinstance(value, dict):
            return [word for name, each in value.items() for word in _words_of_vllm(name, each)]
        if not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
            self.error(f"{file}: {_PASSED_ON}: must be a list of words, or a table of options")
        return cast("list[str]", value)


def split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return what comes before the first `--`, and what comes after it; `None`: there is none."""
    if "--" not in arguments:
        return list(arguments), None
    index = list(arguments).index("--")
    return list(arguments[:index]), list(arguments[index + 1 :])


def _take_file(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Return the file of `--config`, and the arguments without it."""
    for index, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option != "--config":
            continue
        if not equals and index + 1 == len(arguments):
            parser.error("argument --config: expected one argument")
        rest = arguments[index + (1 if equals else 2) :]
        if any(other.partition("=")[0] == "--config" for other in rest):
            parser.error("--config: there may be one file")
        return Path(value if equals else arguments[index + 1]), [*arguments[:index], *rest]
    return None, arguments


def _options(option: str, value: _Value, action: argparse.Action) -> Iterator[str]:
    """Yield the command line's words for an option with a value of a file. Raises `TypeError` where it has none."""
    takes_none = action.nargs in (0, "?")
    if isinstance(value, bool):
        if not takes_none:
            raise TypeError("needs a value, not true or false")
        if value:
            yield option
    elif action.nargs == 0:
        raise TypeError("must be true or false")
    elif isinstance(value, list | dict):
        if not isinstance(action, argparse._AppendAction):  # pyright: ignore[reportPrivateUsage] - it has no other name
            raise TypeError("takes one value")
        items = value if isinstance(value, list) else [f"{name}={_plain(each)}" for name, each in value.items()]
        for item in items:
            yield f"{option}={_plain(item)}"
    else:
        yield f"{option}={_plain(value)}"


def _plain(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"must be text or a number, not {json.dumps(value, default=str)}")
    return str(value)


def _words_of_vllm(name: str, value: object) -> list[str]:
    """Return vLLM's words for an option: true and false are `--name` and `--no-name`, tables JSON."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *(str(each) for each in cast("list[object]", value))]
    return [f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
