"""Values that torch saves in pieces: a list of dicts, such as an optimizer's groups, has an item for each entry.

Where the state has such a list as one value, the pieces are read as that. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from disttrain.checkpoint.format.manifest import Chunk, Manifest
from disttrain.checkpoint.state.tree import Tree, parts_of


@dataclass(frozen=True)
class JoinedChunk(Chunk):
    """A value in pieces, each by the keys that lead to it."""

    pieces: tuple[tuple[tuple[str, ...], Chunk], ...]


def joined(tree: Tree, manifest: Manifest) -> Manifest:
    """The save with one value for each list or dict of the tree that it has in pieces, none of which is a tensor."""
    values = dict(manifest.values)
    for name, leaf in tree.leaves.items():
        if name in values or name in manifest.tensors or isinstance(leaf, torch.Tensor):
            continue
        if not isinstance(leaf, list | tuple | dict):
            continue
        prefix = f"{name}/"
        below = [other for other in values if other.startswith(prefix)]
        if not below or any(other.startswith(prefix) for other in manifest.tensors):
            continue
        pieces = tuple((tuple(parts_of(other.removeprefix(prefix))), values.pop(other)) for other in below)
        first = pieces[0][1]
        values[name] = JoinedChunk(first.file, first.offset, first.num_bytes, first.box, first.checksums, pieces)
    return replace(manifest, values=values)


def assembled(pieces: Mapping[tuple[str, ...], Any]) -> Any:
    """Joins the pieces of a nested value. Where the keys count from 0 on, it is a list."""
    if () in pieces:
        return pieces[()]
    inner: dict[str, dict[tuple[str, ...], Any]] = {}
    for (key, *rest), value in pieces.items():
        inner.setdefault(key, {})[tuple(rest)] = value
    made = {key: assembled(values) for key, values in inner.items()}
    if set(made) == {str(index) for index in range(len(made))}:
        return [made[str(index)] for index in range(len(made))]
    return made
