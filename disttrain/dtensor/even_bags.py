"""Bags of rows, each of as many: torch makes their offsets itself, of nothing but the sizes of the indices.

`torch.nn.functional.embedding_bag` does it for a matrix of indices, in Python and so before anybody is asked. That
plain tensor is the same on all ranks, and stays plain: by it a rule knows bags that lie one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpFacts, is_traced
from disttrain.dtensor.layout import Spec
from disttrain.dtensor.mixed import is_plain

_BAGS: Final = frozenset({"aten._embedding_bag", "aten._embedding_bag_forward_only"})


def specs_of_even_bags(
    facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[Spec | None, ...] | None:
    """Each DTensor's spec, and None for offsets, where these alone are plain, and those of equal bags; else None.

    On GPUs it waits for the offsets.
    """
    if facts.name not in _BAGS or [is_plain(tensor) for tensor in tensors[:3]] != [False, False, True]:
        return None
    given = dict(zip(facts.arguments, args, strict=False)) | kwargs
    offsets, indices = given["offsets"], given["indices"]
    if any(is_plain(tensor) for tensor in tensors[3:]) or given.get("include_last_offset") or is_traced():
        return None
    num_bags, num_indices = offsets.numel(), indices.numel()
    if offsets.is_meta or num_bags == 0 or num_indices % num_bags:
        return None
    even = torch.arange(num_bags, dtype=offsets.dtype, device=offsets.device) * (num_indices // num_bags)
    return tuple(getattr(tensor, "_spec", None) for tensor in tensors) if torch.equal(offsets, even) else None
