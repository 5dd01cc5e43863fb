"""A package's names, fetched when they are first used: importing it then loads nothing heavy. Source: PEP 562."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, home_of: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package whose names are in the modules `home_of` says, below it."""

    def fetch(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        # From now on it is found without asking here.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return list(sys.modules[package].__all__)

    return fetch, names
