"""Every public name of torch.distributed.pipelining is here too, with its arguments, or the page of differences says
why not."""

from __future__ import annotations

import importlib
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

from disttrain import pipelining

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
MODULES = ("", ".microbatch", ".schedules", ".stage")


def test_each_name_and_argument_is_here_or_explained() -> None:
    names = _their_names()
    both = {name: theirs for name, theirs in names.items() if hasattr(pipelining, name)}
    missing = names.keys() - both.keys()
    for name, theirs in both.items():
        missing |= _missing(name, theirs, getattr(pipelining, name))
    explained = _explained()
    assert len(both) == 16
    assert sorted(missing - explained) == []
    # What has come since is taken off the list.
    assert sorted(explained - missing) == []


def test_what_is_here_alone_is_on_the_page() -> None:
    names = _their_names()
    alone = set(pipelining.__all__) - names.keys()
    for name in set(pipelining.__all__) & names.keys():
        ours = getattr(pipelining, name)
        if not (inspect.isclass(ours) and issubclass(ours, Enum)):
            alone |= _arguments(ours).keys() - _arguments(names[name]).keys() - {"stages", "options", "model", "inputs"}
    alone |= {name for name, one in _arguments(pipelining.PipelineSchedule).items() if one.kind is one.KEYWORD_ONLY}
    text = _section("## Pipelines").partition("What is here and not there:")[2]
    assert sorted(alone - set(re.findall(r"`(\w+)`", text))) == []


def _missing(name: str, theirs: Any, ours: Any) -> set[str]:
    """Methods and arguments of `theirs` that `ours` has not; arguments also when they have another default."""
    if inspect.isfunction(theirs):
        return _missing_arguments(name, theirs, ours)
    if issubclass(theirs, Enum):
        return {f"{name}.{member}" for member in theirs.__members__ if member not in ours.__members__}
    missing = _missing_arguments(name, theirs, ours)
    for attribute, value in _attributes(theirs).items():
        if not hasattr(ours, attribute):
            missing.add(f"{name}.{attribute}")
        elif inspect.isfunction(value):
            missing |= _missing_arguments(f"{name}.{attribute}", value, getattr(ours, attribute))
    return missing


def _attributes(cls: type) -> dict[str, Any]:
    """What it and its bases have, as far as these are pipelining's."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("torch.distributed.pipelining")]
    return {name: value for base in bases for name, value in vars(base).items() if not name.startswith("_")}


def _missing_arguments(name: str, theirs: Any, ours: Any) -> set[str]:
    found = _arguments(ours)
    return {
        f"{name}({argument})"
        for argument, parameter in _arguments(theirs).items()
        if argument not in ("args", "kwargs")
        and (argument not in found or parameter.default not in (inspect.Parameter.empty, found[argument].default))
    }


def _arguments(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _their_names() -> dict[str, Any]:
    names = {}
    for suffix in MODULES:
        module = importlib.import_module(f"torch.distributed.pipelining{suffix}")
        names.update({name: getattr(module, name) for name in module.__all__})
    return names


def _explained() -> set[str]:
    section = _section("## Names of torch.distributed.pipelining")
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`([\w.()]+)`", " ".join(rows)))


def _section(title: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(title)[2].partition("\n## ")[0]
