"""Every public name of torch.distributed.tensor.parallel is here too, with its arguments, or the page of
differences says why not."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from torch.distributed import fsdp  # noqa: F401 -- the module below of this name cannot be imported before it

from disttrain import tp

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
MODULES = ("", ".api", ".ddp", ".fsdp", ".input_reshard", ".loss", ".style")


def test_each_name_and_argument_is_here_or_explained() -> None:
    names = _their_names()
    both = {name: theirs for name, theirs in names.items() if hasattr(tp, name)}
    missing = names.keys() - both.keys()
    for name, theirs in both.items():
        missing |= _missing_arguments(name, theirs, getattr(tp, name))
    explained = _explained()
    assert len(both) == 9
    assert sorted(missing - explained) == []
    # What has come since is taken off the list.
    assert sorted(explained - missing) == []


def test_what_is_here_alone_is_on_the_page() -> None:
    text = _section("## Tensor parallel").partition("What is here and not there:")[2]
    alone = set(tp.__all__) - _their_names().keys()
    both = [name for name in tp.__all__ if name not in alone and inspect.isclass(getattr(tp, name))]
    for name in both:
        theirs = inspect.signature(_their_names()[name]).parameters
        alone |= inspect.signature(getattr(tp, name)).parameters.keys() - theirs.keys()
    assert alone <= set(re.findall(r"`(\w+)`", text))


def _missing_arguments(name: str, theirs: Any, ours: Any) -> set[str]:
    """Arguments of `theirs` that `ours` has not, or with another default or kind."""
    expected, found = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
    return {
        f"{name}({argument})"
        for argument, parameter in expected.items()
        if argument not in found
        or (found[argument].default, found[argument].kind) != (parameter.default, parameter.kind)
    }


def _their_names() -> dict[str, Any]:
    names = {}
    for suffix in MODULES:
        module = importlib.import_module(f"torch.distributed.tensor.parallel{suffix}")
        names.update({name: getattr(module, name) for name in module.__all__})
    return names


def _explained() -> set[str]:
    section = _section("## Names of torch.distributed.tensor.parallel")
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`([\w.()]+)`", " ".join(rows)))


def _section(title: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(title)[2].partition("\n## ")[0]
