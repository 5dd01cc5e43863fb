"""Bags of rows, each of as many: torch makes their offsets itself, of nothing but the sizes of the indices.

`torch.nn.functional.embedding_bag` does it for a matrix of indices, in Python and so before anybody is asked. That
plain tensor is the same on all ranks, and stays plain: by it a rule knows bags that lie one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpFacts, is_traced
from disttrain.dtensor.mixed import is_plain

_BAGS: Final = frozenset({"aten._embedding_bag", "aten._embedding_bag_forward_only"})


def has_even_bags(facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> bool:
    """True for a call of which the offsets alone are plain, and are those of equal bags. On GPUs it waits for them."""
    if facts.name not in _BAGS or [is_plain(tensor) for tensor in tensors[:3]] != [False, False, True]:
        return False
    given = dict(zip(facts.arguments, args, strict=False)) | kwargs
    offsets, indices = given["offsets"], given["indices"]
    if any(is_plain(tensor) for tensor in tensors[3:]) or given.get("include_last_offset") or is_traced():
        return False
    num_bags, num_indices = offsets.numel(), indices.numel()
    if offsets.is_meta or num_bags == 0 or num_indices % num_bags:
        return False
    even = torch.arange(num_bags, dtype=offsets.dtype, device=offsets.device) * (num_indices // num_bags)
    return torch.equal(offsets, even)
