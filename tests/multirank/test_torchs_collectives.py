"""Collectives that torch has on Gloo: sparse, and several tensors in one message."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain.errors import ShapeError
from disttrain.testing.pytest_plugin import on_ranks


@on_ranks(3)
def test_sparse_tensors_are_summed() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    own = torch.zeros(4, 2)
    own[rank] = rank + 1.0
    own[3] = 1.0
    tensor = own.to_sparse()
    disttrain.all_reduce(tensor)
    assert tensor.is_sparse
    assert tensor.to_dense().tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [float(size)] * 2]
    with pytest.raises(ShapeError, match="must be contiguous"):
        disttrain.all_reduce(own.to_sparse(), disttrain.ReduceOp.MAX)


@on_ranks(2)
@pytest.mark.parametrize("dtypes", [("float32", "complex64"), ("float32", "int64"), ("bfloat16", "bool")])
def test_several_tensors_of_several_dtypes(dtypes: tuple[str, str]) -> None:
    rank = disttrain.get_rank()
    tensors = [torch.tensor([[rank, 1]]).to(getattr(torch, name)) for name in dtypes]
    gathered = [[torch.empty_like(tensor) for tensor in tensors] for _ in range(2)]
    disttrain.all_gather_coalesced(gathered, tensors)
    for tensor, first, second in zip(tensors, *gathered, strict=True):
        assert first.tolist() == torch.tensor([[0, 1]]).to(tensor.dtype).tolist()
        assert second.tolist() == torch.tensor([[1, 1]]).to(tensor.dtype).tolist()
    disttrain.all_reduce_coalesced(tensors)
    for tensor in tensors:
        assert tensor.tolist() == torch.tensor([[1, 2]]).to(tensor.dtype).tolist()
