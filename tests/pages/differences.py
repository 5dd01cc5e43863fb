"""docs/differences.md, against torch's modules: what of theirs is not here, and which names the page explains."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
Alike = Callable[[inspect.Parameter, inspect.Parameter], bool]


def section(title: str) -> str:
    """What stands under the heading that begins with `title`."""
    return PAGE.read_text(encoding="utf-8").partition(f"## {title}")[2].partition("\n## ")[0]


def names_explained(title: str) -> set[str]:
    """The names in the first column of the section's table."""
    rows = [line.split("|")[1] for line in section(title).splitlines() if line.startswith("| `")]
    return set(re.findall(r"`([\w.()]+)`", " ".join(rows)))


def names_alone(title: str) -> set[str]:
    """The names that the section says are here and not there."""
    return set(re.findall(r"`(\w+)`", section(title).partition("What is here and not there:")[2]))


def public_names(root: str, suffixes: Iterable[str] = ("",)) -> dict[str, Any]:
    """What torch's modules `root` + suffix have in `__all__`."""
    modules = [importlib.import_module(root + suffix) for suffix in suffixes]
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def same_default(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
    return bool(theirs.default == ours.default)


def missing_arguments(
    name: str,
    theirs: Any,
    ours: Any,
    alike: Alike = same_default,
) -> set[str]:
    """Arguments of `theirs`, as "name(argument)", that `ours` has not, or has unlike them."""
    taken = parameters(ours)
    return {
        f"{name}({argument})"
        for argument, parameter in parameters(theirs).items()
        if argument not in ("args", "kwargs") and (argument not in taken or not alike(parameter, taken[argument]))
    }
