"""Every public name of torch.distributed and its parts is here too, with its arguments, or docs/differences.md says why
not."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import disttrain
from disttrain import checkpoint, context_parallel, dtensor, fsdp2, pipelining, tp
from tests.pages.differences import (
    Alike,
    missing_arguments,
    names_alone,
    names_explained,
    parameters,
    public_names,
    same_default,
)

of_torch_213 = pytest.mark.skipif(torch.__version__ < "2.13", reason="the page names what torch 2.13 has")


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
        taken = list(inspect.signature(ours).parameters)
        # We may know fewer arguments, or more: as far as both go, they are the same.
        if taken[: len(expected)] != expected[: len(taken)]:
            differing.append(f"{name}: torch {expected}, ours {taken}")
    assert differing == []


@dataclass(frozen=True)
class Part:
    """A part of torch.distributed: its modules, `root` + each suffix, and ours; they have `num_both` names in common.

    `missing(name, theirs, ours)` names methods and arguments of one that the other has not, or has unlike it.
    """

    root: str
    ours: Any
    modules: tuple[str, ...]
    num_both: int
    missing: Callable[[str, Any, Any], set[str]]

    def names(self) -> dict[str, Any]:
        """All public names of torch's; of a package without a list, those of its own objects."""
        # It takes half a second, and all collect this file. tensor.parallel cannot be imported before fsdp.
        importlib.import_module("torch.distributed.fsdp")
        package = importlib.import_module(self.root)
        own = {
            name: value
            for name, value in vars(package).items()
            if not hasattr(package, "__all__")
            and not name.startswith("_")
            and getattr(value, "__module__", "").startswith(self.root)
        }
        return own | public_names(self.root, self.modules)

    def here(self, name: str) -> Any:
        """Ours of this name; some of a part's names are disttrain's own."""
        found = getattr(self.ours, name, None) or (getattr(disttrain, name, None) if self.ours is dtensor else None)
        return None if isinstance(found, ModuleType) else found  # a part of ours may have the name, too


def _missing_attributes(
    name: str, theirs: Any, ours: Any, attributes: dict[str, Any], missing: Callable[[str, Any, Any], set[str]]
) -> set[str]:
    """Attributes that are not here, and `missing` of methods that are."""
    absent = {f"{name}.{attribute}" for attribute in attributes if not hasattr(ours, attribute)}
    for attribute, value in attributes.items():
        if hasattr(ours, attribute) and inspect.isfunction(value):
            absent |= missing(f"{name}.{attribute}", value, getattr(ours, attribute))
    return absent


def _attributes(cls: type, package: str) -> dict[str, Any]:
    """Public attributes of a class and of its bases, as far as these are of a package of torch's."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith(package)]
    return {name: value for base in bases for name, value in vars(base).items() if not name.startswith("_")}


def _of_checkpoint(name: str, theirs: Any, ours: Any) -> set[str]:
    def alike(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
        # A member of an enum of one's own says nothing else than theirs; options that change nothing are none.
        kinds = {type(parameter.default).__name__ for parameter in (theirs, ours)}
        return same_default(theirs, ours) or len(kinds) == 1 or (ours.default is None and kinds >= {"StagingOptions"})

    if not inspect.isfunction(theirs) and (not inspect.isclass(theirs) or issubclass(theirs, Enum | BaseException)):
        return set()
    missing = missing_arguments(name, theirs, ours, alike)
    if inspect.isclass(theirs):
        public = {attribute: None for attribute in vars(theirs) if not attribute.startswith("_")}
        missing |= _missing_attributes(name, theirs, ours, public, missing_arguments)
    return missing


def _of_dtensor(name: str, theirs: Any, ours: Any) -> set[str]:
    if inspect.isfunction(theirs):
        return missing_arguments(name, theirs, ours)
    attributes = {
        attribute: getattr(theirs, attribute)
        for attribute in _attributes(theirs, "torch.distributed.")
        if attribute not in dir(torch.Tensor)
    }
    return _missing_attributes(name, theirs, ours, attributes, missing_arguments)


def _of_fsdp2(name: str, theirs: Any, ours: Any) -> set[str]:
    def alike(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
        # A policy that changes nothing is none.
        kind = type(theirs.default).__name__
        return same_default(theirs, ours) or (
            ours.default is None and kind in ("MixedPrecisionPolicy", "OffloadPolicy")
        )

    def in_order(name: str, theirs: Any, ours: Any) -> set[str]:
        expected, taken = parameters(theirs), parameters(ours)
        both = [argument for argument in expected if argument in taken]
        assert both == [argument for argument in taken if argument in expected], name
        return missing_arguments(name, theirs, ours, alike)

    if inspect.isfunction(theirs):
        return in_order(name, theirs, ours)
    public = {attribute: value for attribute, value in vars(theirs).items() if not attribute.startswith("_")}
    missing = _missing_attributes(name, theirs, ours, public, in_order)
    if dataclasses.is_dataclass(theirs):
        defaults = {field.name: field.default for field in dataclasses.fields(ours)}
        missing |= {
            f"{name}({field.name})"
            for field in dataclasses.fields(theirs)
            if defaults.get(field.name, dataclasses.MISSING) != field.default
        }
    return missing


def _of_pipelining(name: str, theirs: Any, ours: Any) -> set[str]:
    def missing_of(name: str, theirs: Any, ours: Any) -> set[str]:
        # What has no default there may have one here.
        alike: Alike = lambda theirs, ours: theirs.default in (inspect.Parameter.empty, ours.default)  # noqa: E731
        return missing_arguments(name, theirs, ours, alike)

    if inspect.isclass(theirs) and issubclass(theirs, Enum):
        return {f"{name}.{member}" for member in theirs.__members__ if member not in ours.__members__}
    missing = missing_of(name, theirs, ours)
    if inspect.isclass(theirs):
        attributes = _attributes(theirs, "torch.distributed.pipelining")
        missing |= _missing_attributes(name, theirs, ours, attributes, missing_of)
    return missing


def _of_tp(name: str, theirs: Any, ours: Any) -> set[str]:
    return missing_arguments(
        name, theirs, ours, lambda theirs, ours: (theirs.default, theirs.kind) == (ours.default, ours.kind)
    )


CHECKPOINT_MODULES = (
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
TP_MODULES = ("", ".api", ".ddp", ".fsdp", ".input_reshard", ".loss", ".style")
ROOT = "torch.distributed."
PARTS = {
    "checkpoint": Part(f"{ROOT}checkpoint", checkpoint, CHECKPOINT_MODULES, 21, _of_checkpoint),
    "tensor that": Part(f"{ROOT}tensor", dtensor, ("", ".debug", ".experimental", ".placement_types"), 16, _of_dtensor),
    "fsdp": Part(f"{ROOT}fsdp", fsdp2, ("",), 8, _of_fsdp2),
    "pipelining": Part(
        f"{ROOT}pipelining", pipelining, ("", ".microbatch", ".schedules", ".stage"), 18, _of_pipelining
    ),
    "tensor.parallel": Part(f"{ROOT}tensor.parallel", tp, TP_MODULES, 9, _of_tp),
}
"""By what the headings of docs/differences.md call them."""


@of_torch_213
@pytest.mark.parametrize("title", PARTS)
def test_each_name_and_argument_of_a_part_is_here_or_explained(title: str) -> None:
    part = PARTS[title]
    names = part.names()
    both = {name: theirs for name, theirs in names.items() if part.here(name)}
    missing = names.keys() - both.keys()
    for name, theirs in both.items():
        missing |= part.missing(name, theirs, part.here(name))
    explained = names_explained(f"Names of {ROOT}{title}")
    assert len(both) >= part.num_both
    assert sorted(missing - explained) == []
    # What has come since is taken off the list.
    assert sorted(explained - missing) == []


@of_torch_213
def test_what_pipelining_alone_has_is_on_the_page() -> None:
    names = PARTS["pipelining"].names()
    alone = set(pipelining.__all__) - names.keys()
    for name in set(pipelining.__all__) & names.keys():
        ours = getattr(pipelining, name)
        if not (inspect.isclass(ours) and issubclass(ours, Enum)):
            alone |= parameters(ours).keys() - parameters(names[name]).keys() - {"stages", "options", "model", "inputs"}
    alone |= {name for name, each in parameters(pipelining.PipelineSchedule).items() if each.kind is each.KEYWORD_ONLY}
    assert sorted(alone - names_alone("Pipelines")) == []


def test_what_tp_alone_has_is_on_the_page() -> None:
    names = PARTS["tensor.parallel"].names()
    alone = set(tp.__all__) - names.keys()
    both = [name for name in tp.__all__ if name not in alone and inspect.isclass(getattr(tp, name))]
    for name in both:
        alone |= parameters(getattr(tp, name)).keys() - parameters(names[name]).keys()
    assert sorted(alone - names_alone("Tensor parallel")) == []


@of_torch_213
def test_context_parallel_takes_torchs_arguments() -> None:
    theirs = importlib.import_module(f"{ROOT}tensor.experimental._attention")
    missing: set[str] = set()
    for name in ("context_parallel", "context_parallel_unshard", "set_rotate_method"):
        missing |= missing_arguments(name, getattr(theirs, name), getattr(context_parallel, name))
    assert missing == {"context_parallel_unshard(load_balancer)"} == missing & names_explained("Context parallel")


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
