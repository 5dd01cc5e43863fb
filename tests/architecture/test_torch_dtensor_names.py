"""Every public name of torch.distributed.tensor is here too, with the same arguments, or the page of differences says
why not."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import disttrain
from disttrain import dtensor
from tests.pages.differences import missing_arguments, names_explained, of_torch_213, public_names

MODULES = ("", ".debug", ".experimental", ".placement_types")


@of_torch_213
def test_each_name_and_argument_is_here_or_explained() -> None:
    names = public_names("torch.distributed.tensor", MODULES)
    missing = {name for name in names if _ours(name) is None}
    both = [(name, theirs, _ours(name)) for name, theirs in names.items() if _ours(name)]
    for name, theirs, ours in both:
        missing |= _missing(name, theirs, ours)
    explained = names_explained("Names of torch.distributed.tensor that")
    assert len(both) > 15
    assert sorted(missing - explained) == []
    # What has come since is taken off the list.
    assert sorted(explained - missing) == []


def _missing(name: str, theirs: Any, ours: Any) -> set[str]:
    """Methods and arguments of `theirs` that `ours` has not, or has with another default."""
    if inspect.isfunction(theirs):
        return missing_arguments(name, theirs, ours)
    missing = set()
    methods = {
        attribute: getattr(theirs, attribute)
        for kind in theirs.__mro__
        if kind.__module__.startswith("torch.distributed.")
        for attribute in vars(kind)
        if not attribute.startswith("_") and attribute not in dir(torch.Tensor)
    }
    for attribute, method in methods.items():
        if not hasattr(ours, attribute):
            missing.add(f"{name}.{attribute}")
        elif inspect.isfunction(method):
            missing |= missing_arguments(f"{name}.{attribute}", method, getattr(ours, attribute))
    return missing


def _ours(name: str) -> Any:
    return getattr(dtensor, name, None) or getattr(disttrain, name, None)


def test_placements_are_made_and_asked_alike() -> None:
    from torch.distributed import tensor  # here, since it takes half a second, and all collect this file

    for theirs, ours in (
        (tensor.Shard(dim=1), dtensor.Shard(dim=1)),
        (tensor.Replicate(), dtensor.Replicate()),
        (tensor.Partial(), dtensor.Partial()),
        (tensor.Partial(reduce_op="max"), dtensor.Partial(reduce_op="max")),
    ):
        assert isinstance(ours, dtensor.Placement)
        for question in ("is_shard", "is_replicate", "is_partial"):
            assert getattr(ours, question)() == getattr(theirs, question)()
        assert ours.is_shard(dim=0) == theirs.is_shard(dim=0)
        assert ours.is_partial(reduce_op="max") == theirs.is_partial(reduce_op="max")
        assert getattr(ours, "reduce_op", None) == getattr(theirs, "reduce_op", None)
