"""Every public name of torch.distributed.checkpoint is here too, with its arguments, or the page of differences says
why not."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

from disttrain import checkpoint
from tests.pages.differences import missing_arguments, names_explained, of_torch_213, public_names, same_default

MODULES = (
    ".api",
    ".default_planner",
    ".filesystem",
    ".hf_storage",
    ".metadata",
    ".planner",
    ".staging",
    ".state_dict",
    ".state_dict_loader",
    ".state_dict_saver",
    ".stateful",
    ".storage",
)


@of_torch_213
def test_each_name_and_argument_is_here_or_explained() -> None:
    from torch.distributed import checkpoint as theirs  # here, since it takes half a second, and all collect this file

    names = public_names("torch.distributed.checkpoint", MODULES)
    # The package itself has no list: what of it is its own.
    names |= {
        name: value
        for name, value in vars(theirs).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("torch.distributed.checkpoint")
    }
    both = {name: value for name, value in names.items() if hasattr(checkpoint, name)}
    missing = names.keys() - both.keys()
    for name, value in both.items():
        missing |= _missing(name, value, getattr(checkpoint, name))
    explained = names_explained("Names of torch.distributed.checkpoint")
    assert len(both) > 20
    assert sorted(missing - explained) == []
    # What has come since is taken off the list.
    assert sorted(explained - missing) == []


def _missing(name: str, theirs: Any, ours: Any) -> set[str]:
    """Methods and arguments of `theirs` that `ours` has not, or has with another default."""
    if inspect.isfunction(theirs):
        return missing_arguments(name, theirs, ours, _alike)
    if not inspect.isclass(theirs) or issubclass(theirs, Enum | BaseException):
        return set()
    methods = {attribute for attribute in vars(theirs) if not attribute.startswith("_")}
    return missing_arguments(name, theirs, ours, _alike) | {
        f"{name}.{attribute}" for attribute in methods if not hasattr(ours, attribute)
    }


def _alike(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
    # A member of an enum of one's own says nothing else than theirs; options that change nothing are none.
    kinds = {type(one.default).__name__ for one in (theirs, ours)}
    return same_default(theirs, ours) or len(kinds) == 1 or (ours.default is None and kinds >= {"StagingOptions"})
