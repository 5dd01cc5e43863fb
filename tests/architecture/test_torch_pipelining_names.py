"""Every public name of torch.distributed.pipelining is here too, with its arguments, or the page of differences says
why not."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

from disttrain import pipelining
from tests.pages.differences import (
    missing_arguments,
    names_alone,
    names_explained,
    of_torch_213,
    parameters,
    public_names,
)

THEIRS = "torch.distributed.pipelining"
MODULES = ("", ".microbatch", ".schedules", ".stage")


@of_torch_213
def test_each_name_and_argument_is_here_or_explained() -> None:
    names = public_names(THEIRS, MODULES)
    both = {name: theirs for name, theirs in names.items() if hasattr(pipelining, name)}
    missing = names.keys() - both.keys()
    for name, theirs in both.items():
        missing |= _missing(name, theirs, getattr(pipelining, name))
    explained = names_explained("Names of torch.distributed.pipelining")
    assert len(both) == 18
    assert sorted(missing - explained) == []
    # What has come since is taken off the list.
    assert sorted(explained - missing) == []


@of_torch_213
def test_what_is_here_alone_is_on_the_page() -> None:
    names = public_names(THEIRS, MODULES)
    alone = set(pipelining.__all__) - names.keys()
    for name in set(pipelining.__all__) & names.keys():
        ours = getattr(pipelining, name)
        if not (inspect.isclass(ours) and issubclass(ours, Enum)):
            alone |= parameters(ours).keys() - parameters(names[name]).keys() - {"stages", "options", "model", "inputs"}
    alone |= {name for name, one in parameters(pipelining.PipelineSchedule).items() if one.kind is one.KEYWORD_ONLY}
    assert sorted(alone - names_alone("Pipelines")) == []


def _missing(name: str, theirs: Any, ours: Any) -> set[str]:
    """Methods and arguments of `theirs` that `ours` has not; arguments also when they have another default."""
    if inspect.isfunction(theirs):
        return missing_arguments(name, theirs, ours, _alike)
    if issubclass(theirs, Enum):
        return {f"{name}.{member}" for member in theirs.__members__ if member not in ours.__members__}
    missing = missing_arguments(name, theirs, ours, _alike)
    for attribute, value in _attributes(theirs).items():
        if not hasattr(ours, attribute):
            missing.add(f"{name}.{attribute}")
        elif inspect.isfunction(value):
            missing |= missing_arguments(f"{name}.{attribute}", value, getattr(ours, attribute), _alike)
    return missing


def _attributes(cls: type) -> dict[str, Any]:
    """What it and its bases have, as far as these are pipelining's."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("torch.distributed.pipelining")]
    return {name: value for base in bases for name, value in vars(base).items() if not name.startswith("_")}


def _alike(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
    # What has no default there may have one here.
    return theirs.default in (inspect.Parameter.empty, ours.default)
