"""Collectives as functions, for autograd and for graphs, under the names of torch's functional collectives."""

from __future__ import annotations

from disttrain.lazy_names import answering
from disttrain.process_group.async_tensor import AsyncCollectiveTensor
from disttrain.process_group.functional.functions import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    broadcast,
    permute_tensor,
    reduce_scatter_tensor,
    wait_tensor,
)

all_to_all_single_autograd = all_to_all_single
"""Its name in torch, whose other one has no gradient."""

__all__ = [
    "AsyncCollectiveTensor",
    "all_gather_tensor",
    "all_reduce",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "permute_tensor",
    "reduce_scatter_tensor",
    "wait_tensor",
]

__getattr__ = answering(__name__)
