"""Bags of rows, each of as many: torch makes their offsets itself, of nothing but the sizes of the indices.

`torch.nn.functional.embedding_bag` does it for a matrix of indices, in Python and so before anybody is asked. That
plain tensor is the same on all ranks, and stays plain: by it a rule knows bags that lie one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpFacts, is_traced
from disttrain.dtensor.dispatch.mixed import is_plain
from disttrain.dtensor.spec.layout import Spec

_BAGS: Final = frozenset({"aten._embedding_bag", "aten._embedding_bag_forward_only"})


def specs_of_even_bags(
    facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[Spec | None, ...] | None:
    """Specs of a call of which the offsets alone are plain, and are those of equal bags; None for others.

    On GPUs the host waits for the offsets.
    """
    if facts.name not in _BAGS or [is_plain(tensor) for tensor in tensors[:3]] != [False, False, True]:
        return None
    by_name = dict(zip(facts.arguments, args, strict=False)) | kwargs
    if any(is_plain(tensor) for tensor in tensors[3:]) or by_name.get("include_last_offset") or is_traced():
        return None
    if not _are_even(by_name["offsets"], by_name["indices"].numel()):
        return None
    return tuple(getattr(tensor, "_spec", None) for tensor in tensors)


def _are_even(offsets: torch.Tensor, num_indices: int) -> bool:
    num_bags = offsets.numel()
    if offsets.is_meta or num_bags == 0 or num_indices % num_bags:
        return False
    even = torch.arange(num_bags, dtype=offsets.dtype, device=offsets.device) * (num_indices // num_bags)
    return torch.equal(offsets, even)
