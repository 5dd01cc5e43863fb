"""Collectives as functions, for autograd and for graphs, under the names of torch's functional collectives."""

from __future__ import annotations

from disttrain.lazy_names import answering
from disttrain.process_group.calls.async_tensor import AsyncCollectiveTensor
from disttrain.process_group.functional.coalesced import (
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    reduce_scatter_tensor_coalesced,
)
from disttrain.process_group.functional.functions import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    broadcast,
    permute_tensor,
    reduce_scatter_tensor,
    wait_tensor,
)

# Their names in torch, of which the others have no gradient, and those of torch 2.13.
all_gather_tensor_autograd = all_gather_single = all_gather_single_autograd = all_gather_tensor
all_to_all_single_autograd = all_to_all_single
reduce_scatter_tensor_autograd = reduce_scatter_single = reduce_scatter_single_autograd = reduce_scatter_tensor
all_gather_single_coalesced = all_gather_into_tensor_coalesced
reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

__all__ = [
    "AsyncCollectiveTensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "wait_tensor",
]

__getattr__ = answering(__name__)
