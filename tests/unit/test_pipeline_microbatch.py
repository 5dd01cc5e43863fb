"""Batches are cut into microbatches, and outputs joined again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.microbatch import TensorChunkSpec as TorchSpec
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks as torch_split
from torch.nn.attention.flex_attention import create_block_mask

import disttrain
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.errors import ScheduleError, ShapeError
from disttrain.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from disttrain.testing import run_threads

X = torch.arange(24.0).view(6, 4)


def test_tensors_are_cut_and_all_else_is_given_to_each() -> None:
    args, kwargs = split_args_kwargs_into_chunks((X, {"a": [X[:, 0], 3]}, "text"), {"scale": torch.tensor(2.0)}, 3)
    assert len(args) == len(kwargs) == 3
    for place, ((x, nested, text), named) in enumerate(zip(args, kwargs, strict=True)):
        rows = X[2 * place : 2 * place + 2]
        assert torch.equal(x, rows)
        assert x.data_ptr() == rows.data_ptr()
        assert torch.equal(nested["a"][0], rows[:, 0])
        assert (nested["a"][1], text, named["scale"].item()) == (3, "text", 2)


def test_a_spec_for_all_or_for_each() -> None:
    dims = TensorChunkSpec.from_tuple((1, None))
    args, _ = split_args_kwargs_into_chunks(((X, X), X), None, 2, dims)
    assert torch.equal(args[1][0][1], X[:, 2:])
    assert args[1][1] is X
    args, kwargs = split_args_kwargs_into_chunks(
        ([X, X],), {"y": X, "z": X}, 2, ([TensorChunkSpec(-1), None],), TensorChunkSpec.from_dict({"y": 1})
    )
    assert torch.equal(args[0][0][0], X[:, :2])
    assert args[0][0][1] is X
    assert torch.equal(kwargs[1]["y"], X[:, 2:])
    assert torch.equal(kwargs[1]["z"], X[3:])


@given(num_pieces=st.integers(1, 6), rows=st.integers(1, 4), dim=st.integers(0, 1))
def test_torch_cuts_alike_and_merging_undoes_it(num_pieces: int, rows: int, dim: int) -> None:
    shape = [3, 3]
    shape[dim] = num_pieces * rows
    x = torch.randn(shape)
    ours, _ = split_args_kwargs_into_chunks((x,), None, num_pieces, (TensorChunkSpec(dim),))
    theirs, _ = torch_split((x,), None, num_pieces, (TorchSpec(dim),))
    assert all(torch.equal(one, other) for (one,), (other,) in zip(ours, theirs, strict=True))
    assert torch.equal(merge_chunks([piece for (piece,) in ours], TensorChunkSpec(dim)), x)


@pytest.mark.parametrize(
    ("size", "num_pieces", "remedy"), [(6, 4, "Make it 4 or 8."), (2, 3, "Make it 3."), (1, 2, "give None as its spec")]
)
def test_a_batch_that_does_not_divide_is_refused(size: int, num_pieces: int, remedy: str) -> None:
    with pytest.raises(ScheduleError, match=rf"x\['a'\] has size {size} in dim 0.*{remedy}"):
        split_args_kwargs_into_chunks((), {"x": {"a": torch.ones(size)}}, num_pieces)


@pytest.mark.parametrize(
    ("specs", "named", "problem"),
    [
        ((TensorChunkSpec(0), None), None, "1 positional arguments, and specs for 2"),
        (([None, None],), None, "is not nested"),
        ((2,), None, "holds 2"),
        (None, {"y": None}, "'y', which is no argument"),
    ],
)
def test_specs_that_do_not_fit(specs: Any, named: Any, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        split_args_kwargs_into_chunks((X,), None, 2, specs, named)


def test_other_refusals() -> None:
    with pytest.raises(ShapeError, match=r"args\[0\] has 2 dims, and is to be cut along dim 2"):
        split_args_kwargs_into_chunks((X,), None, 2, (TensorChunkSpec(2),))
    with pytest.raises(ScheduleError, match="0 microbatches"):
        split_args_kwargs_into_chunks((X,), None, 0)
    with pytest.raises(ScheduleError, match="nothing to merge"):
        merge_chunks([])
    with pytest.raises(ScheduleError, match="nested as"):
        merge_chunks([(X,), X])
    with pytest.raises(ScheduleError, match=r"output\['a'\] is not the same"):
        merge_chunks([{"a": 1}, {"a": 2}])


def test_outputs_are_merged() -> None:
    outputs = [{"logits": X, "loss": torch.tensor(1.0), "name": "b", "table": X[0]} for _ in range(2)]
    spec = {"logits": TensorChunkSpec(1), "loss": TensorChunkSpec(0), "name": None, "table": None}
    merged = merge_chunks(outputs, spec)
    assert torch.equal(merged["logits"], torch.cat([X, X], 1))
    assert merged["loss"].tolist() == [1, 1]
    assert merged["name"] == "b"
    assert torch.equal(merged["table"], X[0])
    assert torch.equal(merge_chunks([X, X]), torch.cat([X, X]))


def test_masks_of_blocks() -> None:
    lengths = torch.tensor([3, 7, 5, 9])

    def allowed(b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (kv <= q) & (kv < lengths[b])

    mask = create_block_mask(allowed, 4, 1, 16, 16, device="cpu", BLOCK_SIZE=4)
    ((first,), (second,)), _ = split_args_kwargs_into_chunks((mask,), None, 2)
    assert torch.equal(torch.cat([first.to_dense(), second.to_dense()]), mask.to_dense())
    one = torch.tensor(1)
    places = torch.arange(16)
    assert torch.equal(second.mask_mod(one, one, torch.tensor(15), places), places < 9)
    shared = create_block_mask(allowed, None, None, 16, 16, device="cpu", BLOCK_SIZE=4)
    (_, (given_to_second,)), _ = split_args_kwargs_into_chunks((shared,), None, 2)
    assert given_to_second is shared
    with pytest.raises(ScheduleError, match="a mask for 4 rows"):
        split_args_kwargs_into_chunks((mask,), None, 3)


def test_each_rank_cuts_its_part_of_a_dtensor() -> None:
    x = torch.arange(16.0).view(8, 2)

    def on_rank() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        whole = distribute_tensor(x, mesh, [Shard(0)])
        pieces, _ = split_args_kwargs_into_chunks((whole,), None, 2)
        assert [tuple(piece.shape) for (piece,) in pieces] == [(4, 2), (4, 2)]
        first = 4 * disttrain.get_rank()
        assert torch.equal(pieces[1][0].to_local(), x[first + 2 : first + 4])
        assert torch.equal(merge_chunks([piece for (piece,) in pieces]).full_tensor(), x)

    run_threads(2, on_rank)
