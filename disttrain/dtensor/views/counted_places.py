"""`as_strided` and its kin with a storage offset: places are counted from the start of the memory, not of the tensor.

A DTensor does not know where in the memory of what it views it begins; its parts do, each of its own. So the ranks ask
each other, and all refuse where one of them has a part that begins further in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from disttrain.dtensor._torch import OpFacts
from disttrain.dtensor.redistribute.transfers import all_reduce
from disttrain.dtensor.spec.layout import Spec
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh

_COUNTING = frozenset({"aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter"})
_OFFSET = "storage_offset"


def counts_from_start(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for a call that says where in the memory to begin."""
    if facts.name not in _COUNTING:
        return False
    position = facts.arguments.index(_OFFSET)
    return (args[position] if position < len(args) else kwargs.get(_OFFSET)) is not None


def check_begins_there(name: str, part: torch.Tensor, spec: Spec) -> None:
    """Raise LayoutError on all ranks where a part of the tensor does not begin where its memory does. Collective."""
    begins_later = torch.tensor(int(part.storage_offset() > 0), dtype=torch.int32, device=part.device)
    for axis in range(spec.mesh.ndim):
        begins_later = all_reduce(begins_later, "max", spec.mesh.get_group(axis))
    if begins_later.item():
        raise is_a_view(name, spec.mesh)


def is_a_view(name: str, mesh: DeviceMesh) -> LayoutError:
    return LayoutError(
        name,
        "storage_offset counts from the start of a tensor of which this one is a view.",
        "Leave storage_offset out, to count from the view's own start, or call it on the tensor that is viewed.",
        rank=mesh.world.rank,
    )
