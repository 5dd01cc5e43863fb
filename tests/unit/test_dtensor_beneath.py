"""Operators that torch composes of others, seen as one: those that look beneath, and those that make plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard, distribute_tensor, implicit_replication
from disttrain.errors import LayoutError
from disttrain.testing import run_threads
from tests.cases.shardings import check, laid_out, mesh_of, normal

pytestmark = pytest.mark.filterwarnings("ignore:disttrain.dtensor:UserWarning", "ignore:A window was not provided")

MATRIX = normal(5, 4)
QUERIES, KEYS = normal(3, 4, 2), normal(3, 6, 2, seed=1)
SPECTRUM = torch.stft(normal(40), 8, window=torch.ones(8, dtype=torch.float64), return_complex=True)


def test_indices_to_split_at_may_be_a_dtensor() -> None:
    check(lambda x, places: x.tensor_split(places), MATRIX, torch.tensor([1, 1, 4]))
    check(lambda x, places: x.tensor_split(places, 1), MATRIX, torch.tensor(3))


def into_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the function writes to an `out` that lies in some way of its own."""

    def written(out: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        assert function(*operands, out=out) is out
        return out

    return written


def test_ranks_of_matrices_reach_out() -> None:
    ranks = torch.zeros(2, dtype=torch.int64)
    matrices = torch.stack([MATRIX, MATRIX.clamp_max(0.0) * 0])
    check(into_out(torch.linalg.matrix_rank), ranks, matrices)
    check(into_out(lambda x, out: torch.linalg.matrix_rank(x, tol=0.5, out=out)), ranks, matrices)
    check(into_out(lambda x, tol, out: torch.linalg.matrix_rank(x, rtol=tol, out=out)), ranks, matrices, normal().abs())


def test_a_kronecker_product_reaches_out_wherever_it_lies() -> None:
    left, right = normal(2, 3), normal(3, 2, seed=1)
    check(into_out(torch.kron), torch.zeros(6, 6, dtype=torch.float64), left, right, may_be_partial=False)
    check(
        lambda out, x, y: into_out(torch.kron)(out.t(), x, y),
        torch.zeros(6, 6, dtype=torch.float64),
        left,
        right,
        may_be_partial=False,
    )


def test_masks_and_windows_that_torch_makes_are_no_obstacle() -> None:
    check(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        *(QUERIES, KEYS, KEYS),
        gradients=True,
    )
    check(lambda labels: functional.one_hot(labels, 5), torch.tensor([0, 4, 2]))
    check(torch.combinations, normal(4), gradients=True)
    check(lambda x: torch.istft(x, 8, center=False), SPECTRUM, may_be_partial=False)


def test_a_plain_operand_is_refused_as_ever() -> None:
    def body() -> None:
        queries, keys = (laid_out(each, mesh_of((2,)), [Shard(0)]) for each in (QUERIES, KEYS))
        with pytest.raises(LayoutError, match="meets a plain tensor"):
            functional.scaled_dot_product_attention(queries, keys, keys, attn_mask=normal(4, 6))
        with pytest.raises(LayoutError, match="meets a plain tensor"):
            queries + torch.ones(2, dtype=torch.float64)

    run_threads(2, body)


def test_what_forbids_gathering_forbids_it_while_torch_composes() -> None:
    def body() -> None:
        labels = laid_out(torch.tensor([1.0, 2.0, 3.0]), mesh_of((2,)), [Shard(0)])
        with implicit_replication(False), pytest.raises(LayoutError, match="forbids to gather"):
            torch.combinations(labels)

    run_threads(2, body)


PLACES: dict[str, Any] = {
    "list": [0, 4],
    "beside a slice": (slice(None), [1, 3]),
    "beside a number": (1, [0, 1]),
    "array": np.array([2, 2, 0]),
    "truth values": [True, False, True, False, True],
    "range": range(2),
    "nothing": [],
    "a number": -1,
    "new dim": (None, [1]),
    "ellipsis": (..., [0, 3]),
}


@pytest.mark.parametrize("name", PLACES)
def test_lists_are_indices(name: str) -> None:
    check(lambda x: x[PLACES[name]], MATRIX, num_choices=4, gradients=True)


def test_values_can_be_written_to_lists_of_places() -> None:
    def written(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[[0, 3]] = 7.0
        x[:, [1, 2]] = value
        return x

    check(written, MATRIX, normal(5, 2))


def test_other_subclasses_of_tensors_are_left_alone() -> None:
    class Other(torch.Tensor):
        pass

    tensor = MATRIX.as_subclass(Other)
    parts = torch.tensor_split(tensor, torch.tensor([2]))
    assert [part.tolist() for part in parts] == [MATRIX[:2].tolist(), MATRIX[2:].tolist()]
    assert torch.kron(tensor, tensor, out=torch.zeros(25, 16, dtype=torch.float64)).sum() == pytest.approx(
        MATRIX.sum().item() ** 2
    )
    assert functional.one_hot(torch.tensor([1, 0])).tolist() == [[0, 1], [1, 0]]


def test_indices_on_several_ranks_are_one_list() -> None:
    def body() -> list[Any]:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        tensor = laid_out(torch.arange(6.0), mesh, [Replicate()])
        places = DTensor.from_local(torch.tensor([2 + 2 * mesh.get_local_rank(0)]), mesh, [Shard(0)])
        return [part.tolist() for part in tensor.tensor_split(places)]

    assert run_threads(2, body) == [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]] * 2


def test_what_is_pooled_without_gradients_can_be_written_to_with_gradients() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        for needs_grad in (False, True):
            x = distribute_tensor(torch.arange(16.0).view(2, 1, 8), mesh, [Shard(2)]).requires_grad_(needs_grad)
            weight = distribute_tensor(torch.ones(2, 1, 4), mesh, [Shard(0)]).requires_grad_()
            with torch.no_grad():
                pooled = torch.nn.functional.max_pool1d(x, 2)
            expected = torch.arange(1.0, 17, 2).view(2, 1, 4)
            assert torch.equal(pooled.full_tensor(), expected)
            pooled.mul_(weight)
            pooled.sum().backward()
            assert torch.equal(weight.grad.full_tensor(), expected)
            assert x.grad is None

    run_threads(2, body)
