"""A package's names, fetched when they are first used: importing it then loads nothing heavy. Source: PEP 562.

What is asked for and not there gets an answer, too: submodules are imported, and names of torch's that are not here on
purpose are told with their reason (`absent_names.txt`, which `tools/absent_names.py` takes from docs/differences.md).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PAGE = "docs/differences.md"


def lazily(package: str, home_of: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package whose names are in the modules `home_of` says, below it."""
    otherwise = answering(package)

    def fetch(name: str) -> Any:
        if name not in home_of:
            return otherwise(name)
        value = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        # From now on it is found without asking here.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return list(sys.modules[package].__all__)

    return fetch, names


def answering(package: str) -> Callable[[str], Any]:
    """`__getattr__` for a package: its submodules, else an AttributeError that says why it is not here."""

    def answer(name: str) -> Any:
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        problem = f"module {package!r} has no attribute {name!r}"
        reason = absent_names().get((package, name))
        raise AttributeError(problem if reason is None else f"{problem}, which torch has: {reason}. See {PAGE}.")

    return answer


@cache
def absent_names() -> dict[tuple[str, str], str]:
    """By package and name: why a name of torch's is not here, and what is instead."""
    lines = (Path(__file__).parent / "absent_names.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines)
    return {(package, name): reason for package, name, reason in rows}
