"""Parses command lines: a mistake is told in one sentence, with the flag that was meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from typing import Any, NoReturn

from disttrain.version import __version__

_UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """Flags are written out, so that a new one never changes what an old line means; subcommands' parsers are alike."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Exit with 2, without the usage text around what is wrong."""
        self.exit(2, f"{self.prog}: {explained(self, message)} See {self.prog} --help.\n")


def add_version(parser: argparse.ArgumentParser) -> None:
    """Let `--version` say which disttrain this is."""
    parser.add_argument("--version", action="version", version=f"disttrain {__version__}", help="say it and exit")


def explained(parser: argparse.ArgumentParser, message: str) -> str:
    """argparse's words as sentences, and what an unknown flag may have meant."""
    if not message.startswith(_UNKNOWN):
        return message if message.endswith((".", "?")) else f"{message}."
    flag = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
    flags = list(_flags(parser))
    near = [name for name in flags if name.startswith(flag)] or difflib.get_close_matches(flag, flags, 1)
    return f"{message}. Did you mean {near[0]}?" if near else f"{message}."


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:  # argparse has no other way to ask
        if action.help != argparse.SUPPRESS:
            yield from (flag for flag in action.option_strings if flag.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for command in set(action.choices.values()):
                yield from _flags(command)
