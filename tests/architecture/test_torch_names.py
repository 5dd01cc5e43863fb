"""Every public name of torch.distributed is here too, or docs/differences.md says why not."""

from __future__ import annotations

import inspect
from types import FunctionType

import torch.distributed as dist

import disttrain
from tests.pages.differences import names_explained


def test_each_name_is_here_or_explained() -> None:
    theirs = {name for name, value in vars(dist).items() if not name.startswith("_") and callable(value)}
    explained = names_explained("Names of torch.distributed")
    ours = set(disttrain.__all__)
    assert len(theirs) > 80
    assert sorted(theirs - ours - explained) == []
    assert sorted(ours & explained) == []


def test_what_is_here_takes_torchs_arguments_in_torchs_order() -> None:
    differing = []
    for name in sorted(set(disttrain.__all__) & set(vars(dist))):
        theirs, ours = vars(dist)[name], getattr(disttrain, name)
        if type(theirs) is not FunctionType or type(ours) is not FunctionType:
            continue
        expected = [argument for argument in inspect.signature(theirs).parameters if not argument.startswith("_")]
        found = list(inspect.signature(ours).parameters)
        # We may know fewer arguments, or more: as far as both go, they are the same.
        if found[: len(expected)] != expected[: len(found)]:
            differing.append(f"{name}: torch {expected}, ours {found}")
    assert differing == []
