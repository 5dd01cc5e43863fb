"""Every public name of torch.distributed.fsdp is here too, with its arguments, or the page of differences says why."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from disttrain import fsdp2
from tests.pages.differences import missing_arguments, names_explained, of_torch_213, parameters, same_default


@of_torch_213
def test_each_name_and_argument_is_here_or_explained() -> None:
    from torch.distributed import fsdp  # here, since it takes half a second, and all collect this file

    missing = {name for name in fsdp.__all__ if not hasattr(fsdp2, name)}
    both = [name for name in fsdp.__all__ if hasattr(fsdp2, name)]
    for name in both:
        missing |= _missing(name, getattr(fsdp, name), getattr(fsdp2, name))
    explained = names_explained("Names of torch.distributed.fsdp")
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
    expected, found = parameters(theirs), parameters(ours)
    both = [argument for argument in expected if argument in found]
    assert both == [argument for argument in found if argument in expected], name
    return missing_arguments(name, theirs, ours, _alike)


def _alike(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
    # A policy that changes nothing is none.
    kind = type(theirs.default).__name__
    return same_default(theirs, ours) or (ours.default is None and kind in ("MixedPrecisionPolicy", "OffloadPolicy"))
