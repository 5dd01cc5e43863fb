"""Compares a state with a save: the names that either lacks, the differences, and which of them the caller allows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import torch

from disttrain.arguments import arguments_of
from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.manifest import Manifest
from disttrain.checkpoint.state.tree import Tree, listed, spec_of
from disttrain.checkpoint.stateful import PerRank
from disttrain.errors import CheckpointError

Misfit = Literal["missing", "unexpected", "mismatched"]
Rename = Mapping[str, str] | Callable[[str], str]
MISFITS = ("missing", "unexpected", "mismatched")
Saved = TypeVar("Saved")


@dataclass(frozen=True)
class LoadReport:
    """Names that a load left alone because it was allowed to, on any rank; all empty when everything fitted.

    missing     names in the state that the save lacks: they are as they were before
    unexpected  names in the save that no state has: they were not read
    mismatched  what differs, by name, in words: those are as they were before
    converted   names whose values were converted to the state's dtype
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] | None = None
    converted: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """True if anything was left alone."""
        return bool(self.missing or self.unexpected or self.mismatched)


@dataclass(frozen=True)
class Rules:
    """Differences that a load tolerates: kinds of misfits, names (patterns) whose dtype may change, and other names."""

    allow: frozenset[Misfit] = frozenset()
    convert: tuple[str, ...] = ()
    rename: Rename | None = None

    @classmethod
    def of(cls, allow: Iterable[Misfit], convert: str | Iterable[str], rename: Rename | None) -> Rules:
        """Raises CheckpointError for what is no kind of misfit."""
        with arguments_of("load", remedy="Give lists of kinds of misfits, and of names."):
            allowed = frozenset(allow)
            convert = (convert,) if isinstance(convert, str) else tuple(convert)
        wrong = sorted(allowed.difference(MISFITS))
        if wrong:
            raise CheckpointError("load", f"allow has {wrong}.", f"There are {', '.join(MISFITS)}.")
        return cls(allowed, convert, rename)

    def may_convert(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.convert)

    def renamed(self, manifest: Manifest) -> Manifest:
        """The save by the names that the state has for it."""
        if self.rename is None:
            return manifest
        rename = self.rename
        return with_names(manifest, rename if callable(rename) else lambda name: rename.get(name, name))


@dataclass(frozen=True)
class Misfits:
    """Differences that one rank finds. `mismatched` has a sentence per name; `converted` are dtypes that may differ,
    and do."""

    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, str]
    converted: list[str]

    def to_plain(self) -> list[Any]:
        return [self.missing, self.unexpected, self.mismatched, self.converted]


def with_names(manifest: Manifest, rename: Callable[[str], str]) -> Manifest:
    """The same save under other names. Raises CheckpointError where two become one."""
    olds: dict[str, str] = {}

    def new(items: Mapping[str, Saved]) -> dict[str, Saved]:
        renamed = {}
        for old, item in items.items():
            name = rename(old)
            if olds.setdefault(name, old) != old:
                raise CheckpointError("load", f"{olds[name]!r} and {old!r} are both renamed to {name!r}.", "Name one.")
            renamed[name] = item
        return renamed

    return replace(
        manifest,
        tensors=new(manifest.tensors),
        values=new(manifest.values),
        per_rank=new(manifest.per_rank),
        same_as={name: rename(first) for name, first in new(manifest.same_as).items()},
    )


def compare(tree: Tree, manifest: Manifest, rules: Rules) -> Misfits:
    """Finds where this rank's state and the save differ."""
    saved = {
        **dict.fromkeys((*manifest.tensors, *manifest.same_as), "a tensor"),
        **dict.fromkeys(manifest.values, "a value"),
        **dict.fromkeys(manifest.per_rank, "a value per rank"),
    }
    # A tied tensor is filled under whichever of its names the save has.
    filled = {id(tensor) for name, tensor in tree.tensors.items() if name in saved}
    misfits = Misfits(
        [
            name
            for name, leaf in tree.leaves.items()
            # An empty dict wants nothing; saves had no place for them once.
            if name not in saved and id(leaf) not in filled and not (isinstance(leaf, dict) and not leaf)
        ],
        [name for name in saved if name not in tree.leaves and tree.make_for(name) is None],
        {},
        [],
    )
    for name, leaf in tree.leaves.items():
        if name not in saved:
            continue
        if saved[name] != _kind(leaf):
            misfits.mismatched[name] = f"{name} is {saved[name]} there, {_kind(leaf)} here"
        elif isinstance(leaf, torch.Tensor):
            _compare_tensor(tree.operation, name, leaf, manifest, rules, misfits)
    return misfits


def _compare_tensor(
    operation: str, name: str, leaf: torch.Tensor, manifest: Manifest, rules: Rules, misfits: Misfits
) -> None:
    tensor, spec = manifest.tensor_named(name), spec_of(operation, name, leaf)
    if tensor is None:
        misfits.mismatched[name] = f"{name} has no chunks there"
    elif (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype):
        return
    elif tensor.shape == spec.shape and rules.may_convert(name) and _is_convertible(tensor.dtype, leaf.dtype):
        misfits.converted.append(name)
    else:
        misfits.mismatched[name] = (
            f"{name} is {tensor.dtype}{list(tensor.shape)} there, {spec.dtype}{list(spec.shape)} here"
        )


def _is_convertible(saved: str, dtype: torch.dtype) -> bool:
    return dtype.is_complex or not dtype_named(saved).is_complex


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return "a tensor"
    return "a value per rank" if isinstance(leaf, PerRank) else "a value"


def judge(where: str, rules: Rules, rows: list[list[Any]]) -> list[Any]:
    """Makes the report on rank 0, as plain values, or raises one error for all differences that are not allowed.

    What one rank does not expect, another may.
    """
    missing = sorted({name for names, _, _, _ in rows for name in names})
    unexpected = sorted(set.intersection(*({*names} for _, names, _, _ in rows)))
    mismatched: dict[str, str] = {}
    for _, _, sentences, _ in rows:
        mismatched |= sentences
    converted = sorted({name for *_, names in rows for name in names})
    problems = []
    if missing and "missing" not in rules.allow:
        problems.append(f"the save lacks {listed(missing)}")
    if unexpected and "unexpected" not in rules.allow:
        problems.append(f"the state lacks {listed(unexpected)}")
    if mismatched and "mismatched" not in rules.allow:
        problems.append(_some(mismatched.values()))
    if problems:
        raise CheckpointError(
            "load",
            f"{where} does not fit: {'; '.join(problems)}.",
            "Build the state as it was when it was saved, or say what may differ: allow=, rename=, convert=.",
        )
    return [missing, unexpected, mismatched, converted]


def _some(sentences: Collection[str], limit: int = 8) -> str:
    more = f"; and {len(sentences) - limit} more" if len(sentences) > limit else ""
    return "; ".join(sorted(sentences)[:limit]) + more


def report_of(plain: list[Any]) -> LoadReport:
    """The report that `judge` made."""
    missing, unexpected, mismatched, converted = plain
    return LoadReport(tuple(missing), tuple(unexpected), dict(mismatched), tuple(converted))
