"""compare_ranks: what ranks do differently is an error on all of them, with operator, rank and difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttrain
from disttrain.dtensor import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    compare_ranks,
    distribute_tensor,
    implicit_replication,
)
from disttrain.errors import RankMismatchError
from disttrain.testing import run_threads
from tests.cases.shardings import mesh_of, normal


def rank() -> int:
    return disttrain.get_rank()


def whole() -> DTensor:
    return distribute_tensor(normal(5, 3), mesh_of((2, 2)), [Shard(0), Replicate()], src_data_rank=None)


def differs(message: str, function: Callable[[], Any]) -> None:
    """`function` raises on all of four ranks, with one message."""

    def body() -> str:
        with pytest.raises(RankMismatchError, match=message) as caught, compare_ranks(mesh_of((2, 2))):
            function()
        return str(caught.value).partition(" [rank")[0]

    assert len(set(run_threads(4, body))) == 1


def test_what_all_ranks_do_alike_passes() -> None:
    def body() -> None:
        mesh = mesh_of((2, 2))
        weight = distribute_tensor(normal(4, 3), mesh, [Replicate(), Shard(0)], src_data_rank=None).requires_grad_()
        with compare_ranks(mesh), implicit_replication():
            out = torch.nn.functional.linear(whole(), weight).relu() * torch.ones(5, 4).double()
            out.square().mean().backward()
            assert weight.grad is not None
            assert torch.isfinite(weight.grad.full_tensor()).all()
            torch._foreach_mul_([weight.detach()], 0.5)
        assert torch.equal(weight.full_tensor(), normal(4, 3) * 0.5)

    run_threads(4, body)


def test_other_operators() -> None:
    differs(
        r"aten\.exp\.default: rank 2 has come to aten\.sin\.default instead, unlike rank 0\.",
        lambda: whole().sin() if rank() == 2 else whole().exp(),
    )


def test_one_operator_more_or_less() -> None:
    differs("rank 3 has come to the end of compare_ranks", lambda: None if rank() == 3 else whole().exp())
    differs("rank 1 has come to redistribute to .*Shard", lambda: gathered(whole()) if rank() == 1 else whole().exp())


def gathered(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Shard(0), Shard(1)])


def test_other_arguments() -> None:
    differs(
        r"aten\.mul\.Tensor: argument other differs: 2\.0 on rank 0, 3\.0 on rank 1", lambda: whole() * (2.0 + rank())
    )
    differs(r"argument dim differs: 0 on rank 0, 1 on rank 3", lambda: whole().cumsum(rank() // 3))
    differs(
        r"its arguments differs: self, dim on rank 0, self, dim, descending on rank 2",
        lambda: whole().sort(0) if rank() < 2 else whole().sort(0, True),
    )
    differs(r"redistribute to .*Replicate.* has come to", lambda: whole().redistribute(placements=kept_or_not()))


def kept_or_not() -> list[Any]:
    return [Replicate() if rank() == 0 else Shard(0), Replicate()]


def test_other_values_of_plain_and_replicated_tensors() -> None:
    def plain() -> None:
        with implicit_replication():
            torch.add(whole(), torch.full((3,), float(rank() == 3)).double())

    differs(r"the value of argument other differs: \w+ on rank 0, \w+ on rank 3", plain)

    def replicated() -> None:
        mesh = mesh_of((2, 2))
        DTensor.from_local(torch.tensor([1.0, rank() // 2 + rank() % 2]), mesh, [Shard(0), Replicate()]).sin()

    differs("the replicated value of argument self differs: .* on rank 0, .* on rank 1", replicated)


def test_a_gradient_that_each_rank_makes_in_its_own_way() -> None:
    def backward(*, says_so: bool) -> None:
        weight = distribute_tensor(normal(3), mesh_of((2, 2)), src_data_rank=None).requires_grad_()
        local = weight.to_local(grad_placements=[Partial(), Partial()] if says_so else None)
        (local * rank()).sum().backward()

    differs(r"the replicated value of .* differs.*grad_placements=\[Partial\(\)\]", lambda: backward(says_so=False))

    def body() -> None:
        with compare_ranks(mesh_of((2, 2))):
            backward(says_so=True)

    run_threads(4, body)


def test_it_costs_nothing_outside() -> None:
    def body() -> None:
        mesh = mesh_of((2, 2))
        with CommDebugMode() as comms:
            with compare_ranks(mesh):
                whole().sin()
            inside = comms.get_total_counts()
            whole().sin()
            assert inside > 0
            assert comms.get_total_counts() == inside

    run_threads(4, body)
