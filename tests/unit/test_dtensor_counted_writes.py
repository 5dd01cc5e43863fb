"""All writes to a DTensor are counted, as autograd counts them: views across a cut and graphs know of each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import kernels
from disttrain.dtensor import Partial, Placement, Replicate, Shard
from disttrain.testing import run_threads
from tests.cases.dtensors import counted, laid


def test_a_list_is_counted_as_written_to() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        tensor = laid(counted(4, 6), mesh, [Shard(0)]).requires_grad_()
        with torch.no_grad():
            row = tensor[3]
            for _ in range(2):
                torch._foreach_mul_([tensor], 2.0)
            assert torch.equal(row.full_tensor(), counted(4, 6)[3] * 4)
        squares = tensor * tensor
        with torch.no_grad():
            torch._foreach_mul_([tensor], 2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()

    run_threads(2, body)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_steps_of_optimizers_are_seen(options: dict[str, bool]) -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (3,))
        whole = counted(7, 6)
        expected, found = nn.Parameter(whole.clone()), nn.Parameter(laid(whole, mesh, [Shard(0)]))
        views = [parameter.detach()[5:][0] for parameter in (expected, found)]
        optimizers = [torch.optim.Adam([parameter], lr=0.1, **options) for parameter in (expected, found)]
        for _ in range(3):
            for parameter, optimizer in zip((expected, found), optimizers, strict=True):
                parameter.grad = torch.ones_like(parameter)
                kept = (parameter * parameter).sum()
                optimizer.step()
                if "fused" not in options:  # of which torch's count nothing
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        kept.backward()
            torch.testing.assert_close(views[1].full_tensor(), views[0])

    run_threads(3, body)


MAKERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.Adam(params, foreach=True),
    "fused": lambda params: torch.optim.Adam(params, fused=True),
    "one by one": lambda params: torch.optim.Adam(params, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "kernels' AdamW": kernels.AdamW,
    "kernels' Lion": kernels.Lion,
}


@pytest.mark.parametrize("name", MAKERS)
def test_steps_are_seen_by_views_of_states(name: str) -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        parameter = nn.Parameter(laid(counted(4, 6), mesh, [Shard(0)]))
        optimizer = MAKERS[name]([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        states = [state for state in optimizer.state[parameter].values() if state.ndim]
        rows = [state[3] for state in states]
        for _ in range(2):
            before = [row.full_tensor().clone() for row in rows]
            optimizer.step()
            for state, row, old in zip(states, rows, before, strict=True):
                assert torch.equal(row.full_tensor(), state.full_tensor()[3])
                assert not torch.equal(row.full_tensor(), old)

    run_threads(2, body)


@pytest.mark.parametrize("scales", [False, True])
def test_what_else_a_fused_step_writes_to_is_seen(scales: bool) -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        parts = [laid(counted(4, 6), mesh, [Shard(0)]) for _ in range(4)]
        rows = [part[3] for part in parts]
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        options |= {"grad_scale": torch.tensor(2.0)} if scales else {}
        for _ in range(2):
            versions = [part._version for part in parts]
            lists = [[part] for part in parts]
            torch._fused_adam_(*lists, [], [torch.tensor(1.0)], **options, amsgrad=False, maximize=False)
            counted_ones = [part._version > version for part, version in zip(parts, versions, strict=True)]
            assert counted_ones == [True, scales, True, True]
            for part, row in zip(parts, rows, strict=True):
                assert torch.equal(row.full_tensor(), part.full_tensor()[3])

    run_threads(2, body)


def test_unscaled_gradients_and_lists_with_partial_ones_are_seen() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        plain, grad = counted(4, 6), laid(counted(4, 6), mesh, [Shard(0)])
        row = grad[3]
        torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(()), torch.tensor(0.5))
        assert torch.equal(row.full_tensor(), plain[3] / 2)
        partial, factor = laid(plain, mesh, [Partial("max")]), laid(plain, mesh, [Replicate()])
        torch._foreach_addcmul_([grad, partial], [factor] * 2, [factor] * 2, 0.5)
        assert torch.equal(row.full_tensor(), (plain / 2 + plain * plain / 2)[3])

    run_threads(2, body)


def test_data_of_data_is_counted_apart() -> None:
    def body() -> None:
        tensor = laid(counted(4, 6), disttrain.init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
        data = tensor.data
        row = data[3]
        data.copy_(tensor * 1)
        halves = data.split(3, 1)
        version = data._version
        halves[0].data.add_(1)
        halves[0].data.mul_(2)
        assert data._version == version
        halves[1].data.mul_(2)
        expected = counted(4, 6)
        expected[:, :3] += 1
        expected *= 2
        assert torch.equal(row.full_tensor(), expected[3])
        assert torch.equal(halves[0][3].full_tensor(), expected[3, :3])

    run_threads(2, body)


def test_a_view_that_got_its_gradient_alone_has_no_views_to_write_to() -> None:
    def written_view_of(view: torch.Tensor) -> torch.Tensor:
        again = view.requires_grad_().view(4)
        with torch.no_grad():
            again[0] = 1.0
        return again

    def body() -> None:
        plain, tensor = counted(4, 1), laid(counted(4, 1), disttrain.init_device_mesh("cpu", (1,)), [Replicate()])
        view = plain[:, 0]
        (written_view_of(view) * 2).sum().backward()
        assert view.grad is None  # forgotten, without a word
        with pytest.raises(RuntimeError, match="new_fn INTERNAL ASSERT FAILED"):
            written_view_of(tensor[:, 0]).mul(2)
        clone = tensor[:, 0].clone()
        (written_view_of(clone) * 2).sum().backward()
        assert torch.equal(clone.grad.full_tensor(), torch.full((4,), 2.0, dtype=torch.float64))

    run_threads(1, body)


def test_copies_and_redistributions_that_share_memory_are_counted_with_it() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (3,))
        plain, tensor = counted(7, 6), laid(counted(7, 6), mesh, [Shard(0)])
        row, expected = tensor[5:][0], plain[5:][0]
        for one in (
            copy.copy(tensor),
            tensor.redistribute(placements=[Shard(0)]),
            copy.copy(tensor[1:]),
            tensor.view_as(tensor),
        ):
            one.add_(1)
            (plain[1:] if one.shape[0] == 6 else plain).add_(1)
            assert torch.equal(row.full_tensor(), expected)
            copy.copy(row).mul_(2)
            expected.mul_(2)
            assert torch.equal(tensor.full_tensor(), plain)

    run_threads(3, body)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial("sum")], ids=str)
def test_pieces_of_an_unsafe_split_share_memory(placement: Placement) -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (3,))
        tensors = [counted(7, 6), laid(counted(7, 6), mesh, [placement])]
        rows = [tensor[5] for tensor in tensors]
        pieces = [
            [*torch.unsafe_split(tensor, 3), *torch.unsafe_split_with_sizes(tensor, [2, 4], 1), *tensor.unsafe_chunk(2)]
            for tensor in tensors
        ]

        def check() -> None:
            for expected, found in zip(
                [tensors[0], rows[0], *pieces[0]], [tensors[1], rows[1], *pieces[1]], strict=True
            ):
                assert torch.equal(found.full_tensor(), expected)

        check()
        for tensor in tensors:
            tensor.mul_(2)
        check()
        for place in (1, 3, 6):
            for own in pieces:
                own[place].mul_(3)
            check()

    run_threads(3, body)


def test_pieces_of_an_unsafe_split_are_written_to_within_a_graph() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        leaves = [counted(4, 6).requires_grad_(), laid(counted(4, 6), mesh, [Shard(1)]).requires_grad_()]
        for leaf in leaves:
            first, second = (leaf / 8).unsafe_chunk(2, 1)
            (first.sigmoid_() * second.tanh_()).sum().backward()
        torch.testing.assert_close(leaves[1].grad.full_tensor(), leaves[0].grad)

    run_threads(2, body)
