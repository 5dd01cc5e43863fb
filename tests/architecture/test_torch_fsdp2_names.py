"""Every public name of torch.distributed.fsdp is here too, with its arguments, or the page of differences says why."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

from torch.distributed import fsdp

from disttrain import fsdp2

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"


def test_each_name_and_argument_is_here_or_explained() -> None:
    missing = {name for name in fsdp.__all__ if not hasattr(fsdp2, name)}
    both = [name for name in fsdp.__all__ if hasattr(fsdp2, name)]
    for name in both:
        missing |= _missing(name, getattr(fsdp, name), getattr(fsdp2, name))
    explained = _explained()
    assert len(both) > 7
    assert sorted(missing - explained) == []
    # What has come since is taken off the list.
    assert sorted(explained - missing) == []


def _missing(name: str, theirs: Any, ours: Any) -> set[str]:
    """Methods, fields and arguments of `theirs` that `ours` has not, or has elsewhere or with another default."""
    if inspect.isfunction(theirs):
        return _missing_arguments(name, theirs, ours)
    missing = set()
    for attribute, value in vars(theirs).items():
        if attribute.startswith("_"):
            continue
        if not hasattr(ours, attribute):
            missing.add(f"{name}.{attribute}")
        elif inspect.isfunction(value):
            missing |= _missing_arguments(f"{name}.{attribute}", value, getattr(ours, attribute))
    if dataclasses.is_dataclass(theirs):
        defaults = {field.name: field.default for field in dataclasses.fields(ours)}
        missing |= {
            f"{name}({field.name})"
            for field in dataclasses.fields(theirs)
            if defaults.get(field.name, dataclasses.MISSING) != field.default
        }
    return missing


def _missing_arguments(name: str, theirs: Any, ours: Any) -> set[str]:
    expected, found = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
    missing = {
        f"{name}({argument})"
        for argument, parameter in expected.items()
        if argument not in found or not _same_default(found[argument].default, parameter.default)
    }
    both = [argument for argument in expected if argument in found]
    assert both == [argument for argument in found if argument in expected], name
    return missing


def _same_default(ours: object, theirs: object) -> bool:
    # A policy that changes nothing is none.
    return ours == theirs or (ours is None and type(theirs).__name__ in ("MixedPrecisionPolicy", "OffloadPolicy"))


def _explained() -> set[str]:
    section = PAGE.read_text(encoding="utf-8").partition("## Names of torch.distributed.fsdp")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`([\w.()]+)`", " ".join(rows)))
