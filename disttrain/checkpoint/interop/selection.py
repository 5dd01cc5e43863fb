"""Selects the part of a save that is converted: as asked, or, where a format cannot hold all of it, the model. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from disttrain.checkpoint.format.dtypes import is_safetensors_dtype
from disttrain.checkpoint.format.manifest import Manifest
from disttrain.checkpoint.loading.fits import with_names
from disttrain.checkpoint.state.tree import listed
from disttrain.errors import CheckpointError

_MODEL = "model"


class Selection(NamedTuple):
    """The part of a save that is converted, by its new names, and the parts that are not."""

    manifest: Manifest
    left_out: tuple[str, ...] = ()


def select(manifest: Manifest, to: str, only: Sequence[str] = (), without: Sequence[str] = ()) -> Selection:
    """The part of a save that becomes one of the format `to`.

    `only` and `without` have names, what names begin with up to a `/`, or patterns. For safetensors, which hold tensors
    alone: where nothing is asked for and there is more, the part "model"; names begin below the one part that is there.
    Raises CheckpointError for what names nothing, and where it takes a person to say what the model is.
    """
    names = _names(manifest)
    for part in (*only, *without):
        if not any(_lies_in(name, part) for name in names):
            raise CheckpointError("convert", f"the save has no {part!r}.", f"It has {listed(_tops(names))}.")
    if to == "safetensors" and not only and not without:
        only = _of_model(manifest)
    selected = {
        name
        for name in names
        if (not only or any(_lies_in(name, part) for part in only))
        and not any(_lies_in(name, part) for part in without)
    }
    chosen = _restricted(manifest, selected)
    if to == "safetensors":
        chosen = _from_below(chosen, only[0] if len(only) == 1 else _MODEL)
    return Selection(chosen, _left_out(names, selected))


def _names(manifest: Manifest) -> list[str]:
    return [*manifest.tensors, *manifest.same_as, *manifest.values, *manifest.per_rank]


def _lies_in(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/") or fnmatchcase(name, part)


def _tops(names: Collection[str]) -> set[str]:
    return {name.partition("/")[0] for name in names}


def _of_model(manifest: Manifest) -> list[str]:
    """The selection where nobody asked for one: nothing but the model, unless the save is all tensors anyway."""
    others = [*manifest.values, *manifest.per_rank]
    others += [name for name, tensor in manifest.tensors.items() if not is_safetensors_dtype(tensor.dtype)]
    if not others:
        return []
    if any(name.startswith(f"{_MODEL}/") for name in (*manifest.tensors, *manifest.same_as)):
        return [_MODEL]
    raise CheckpointError(
        "convert",
        f"{others[0]!r} has no place in safetensors, which hold tensors alone, and no part of the save is named model.",
        f"Say what is wanted, --only NAME (in Python only=), or what is not, --without NAME, of "
        f"{listed(_tops(_names(manifest)))}.",
    )


def _restricted(manifest: Manifest, selected: Collection[str]) -> Manifest:
    """The save without what is not kept. A tied tensor whose first name goes is kept under the next one."""
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if name in selected}
    now_first: dict[str, str] = {name: name for name in tensors}
    same_as = {}
    for name, first in manifest.same_as.items():
        if name not in selected:
            continue
        if first in now_first:
            same_as[name] = now_first[first]
        else:
            now_first[first] = name
            tensors[name] = manifest.tensors[first]
    return replace(
        manifest,
        tensors=tensors,
        values={name: chunk for name, chunk in manifest.values.items() if name in selected},
        per_rank={name: chunks for name, chunks in manifest.per_rank.items() if name in selected},
        same_as=same_as,
    )


def _from_below(manifest: Manifest, part: str) -> Manifest:
    """Names without the part that all of them lie in, where they do: a file of a model has the model's own names."""
    if not all(name.startswith(f"{part}/") for name in _names(manifest)):
        return manifest
    return with_names(manifest, lambda name: name.removeprefix(f"{part}/"))


def _left_out(names: Collection[str], selected: Collection[str]) -> tuple[str, ...]:
    """Parts of which nothing is kept, and single names of the others."""
    gone = [name for name in names if name not in selected]
    tops_kept = _tops(selected)
    whole = {top for top in _tops(gone) if top not in tops_kept}
    return tuple(sorted(whole | {name for name in gone if name.partition("/")[0] in tops_kept}))
