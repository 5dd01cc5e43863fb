"""What stands around DTensors: counting, local functions, modules, rules of users, replication, pictures."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    distribute_module,
    distribute_tensor,
    implicit_replication,
    local_map,
    register_sharding,
    visualize_sharding,
)
from disttrain.dtensor.rules import CUSTOM
from disttrain.dtensor.spec.layout import forget_plans
from disttrain.errors import LayoutError
from disttrain.testing import run_threads


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def test_collectives_and_their_bytes_are_counted() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        x = distribute_tensor(numbers(4, 3), mesh, [Shard(0)])
        comms = CommDebugMode()
        with comms:
            total = x.sum()
            assert comms.get_total_counts() == 0
            total.full_tensor()
            x.full_tensor()
            x.full_tensor()
        x.full_tensor()
        assert comms.get_comm_counts() == {"all_reduce": 1, "all_gather_into_tensor": 2}
        assert comms.get_comm_bytes() == {"all_reduce": 8, "all_gather_into_tensor": 2 * 2 * 3 * 8}
        assert comms.get_total_counts() == 3
        assert comms.get_total_bytes() == 104
        assert str(comms).splitlines() == [
            "operation               calls  bytes",
            "all_gather_into_tensor      2     96",
            "all_reduce                  1      8",
            "all                         3    104",
        ]
        with comms:
            pass
        assert comms.get_comm_counts() == {}

    run_threads(2, body)


def test_a_local_function_is_given_parts_and_its_results_are_parts() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        rows = distribute_tensor(numbers(3, 4), mesh, [Shard(1)]).requires_grad_()
        columns = distribute_tensor(numbers(4, 5), mesh, [Shard(0)]).requires_grad_()

        @local_map(out_placements=([Partial()], None), in_placements=([Shard(1)], [Shard(0)]))
        def product(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, int]:
            assert type(left) is torch.Tensor
            return left @ right, left.shape[1]

        result, size = product(rows, columns)
        assert result.placements == (Partial(),)
        assert size == 2
        assert torch.equal(result.full_tensor(), numbers(3, 4) @ numbers(4, 5))
        result.full_tensor().sum().backward()
        assert isinstance(rows.grad, DTensor)
        left = numbers(3, 4).requires_grad_()
        (left @ numbers(4, 5)).sum().backward()
        torch.testing.assert_close(rows.grad.full_tensor(), left.grad)
        whole = columns.detach().redistribute(placements=[Replicate()])
        with pytest.raises(LayoutError, match=r"argument 1 lies as .*Replicate.*redistribute_inputs=True"):
            product(rows, whole)
        moving = local_map(
            lambda left, right: left @ right,
            out_placements=[Partial()],
            in_placements=([Shard(1)], [Shard(0)]),
            redistribute_inputs=True,
        )
        assert torch.equal(moving(rows.detach(), whole).full_tensor(), numbers(3, 4) @ numbers(4, 5))
        assert torch.equal(moving(numbers(2, 2), numbers(2, 2)), numbers(2, 2) @ numbers(2, 2))
        with pytest.raises(LayoutError, match="there are 1 results and out_placements for 2"):
            local_map(torch.sin, out_placements=([Shard(0)], None))(whole)
        with pytest.raises(LayoutError, match="result 0 is a int, and its out_placements are"):
            local_map(lambda part: part.ndim, out_placements=[Shard(0)])(whole)

    run_threads(2, body)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.register_buffer("count", torch.rand(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


def test_a_module_is_replicated_but_for_what_is_partitioned() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        torch.manual_seed(disttrain.get_rank())
        module = nn.Sequential(Scaled(), Scaled())

        def partition(name: str, part: nn.Module, mesh: disttrain.DeviceMesh) -> None:
            if name == "1":
                weight = distribute_tensor(part.weight.detach(), mesh, [Shard(0)])
                part.register_parameter("weight", nn.Parameter(weight))

        seen: list[str] = []
        distribute_module(
            module,
            mesh,
            partition,
            input_fn=lambda _, inputs, mesh: seen.append("in") or inputs,
            output_fn=lambda _, outputs, mesh: seen.append("out") or outputs,
        )
        placements = {name: tensor.placements for name, tensor in module.state_dict().items()}
        assert placements.pop("1.weight") == (Shard(0),)
        assert set(placements.values()) == {(Replicate(),)}
        bias = module[1].bias
        assert isinstance(bias, DTensor)
        sums = torch.zeros(2)
        disttrain.all_gather_into_tensor(sums, bias.to_local().detach().sum().view(1))
        assert sums[0] == sums[1]
        assert isinstance(module[0].count, DTensor)
        result = module(distribute_tensor(torch.ones(2, 4), mesh))
        assert seen == ["in", "out"]
        whole = {name: tensor.full_tensor() for name, tensor in module.state_dict().items()}
        expected = (whole["0.weight"] + whole["0.bias"]) * whole["1.weight"] + whole["1.bias"]
        torch.testing.assert_close(result.full_tensor(), expected.expand(2, 4))

    run_threads(2, body)


@torch.library.custom_op("disttrain_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor, times: float) -> torch.Tensor:
    return x * 2 * times


doubled.register_fake(lambda x, times: torch.empty_like(x))


def test_users_say_how_their_operators_shard() -> None:
    op = torch.ops.disttrain_tests.doubled.default
    calls: list[Any] = []

    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        x = distribute_tensor(numbers(5, 4), mesh, [Shard(0)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = op(x, 3.0)
        assert result.placements == (Shard(0),)
        assert torch.equal(result.full_tensor(), numbers(5, 4) * 6)
        assert torch.equal(op(x, 4.0).full_tensor(), numbers(5, 4) * 8)
        other = op(x.redistribute(placements=[Shard(1)]), 3.0)
        assert other.placements == (Shard(0),)

    def choices(x: Spec, times: float) -> list[Any]:
        calls.append((x.ndim, x.shape, times))
        return [([Shard(0)], [Shard(0), None])]

    try:
        register_sharding(op)(choices)
        run_threads(2, body)
        assert (2, (5, 4), 3.0) in calls
        register_sharding([op])(lambda x, times: [([Shard(0)], [Shard(0)]), ([], [])])
        with pytest.raises(LayoutError, match="has 0 operands and 0 results; the operator has 1 and 1"):
            run_threads(1, lambda: op(distribute_tensor(numbers(2), disttrain.init_device_mesh("cpu", (1,))), 1.0))
    finally:
        del CUSTOM[op]
        forget_plans()


def test_plain_tensors_are_replicated_where_that_is_wanted() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        x = distribute_tensor(numbers(4, 3), mesh, [Shard(0)]).requires_grad_()
        plain = numbers(4, 3) + 1
        with pytest.raises(LayoutError, match=r"meets a plain tensor of shape \(4, 3\).*implicit_replication\(\)"):
            x * plain
        with implicit_replication():
            product = x * plain
            assert product.placements == (Shard(0),)
            assert torch.equal(product.full_tensor(), numbers(4, 3) * plain)
            product.sum().backward()
            assert isinstance(x.grad, DTensor)
            assert torch.equal(x.grad.full_tensor(), plain)
            with pytest.raises(LayoutError, match="meets a plain tensor"):
                plain.add_(x.detach())
        with pytest.raises(LayoutError, match="meets a plain tensor"):
            x * plain

    run_threads(2, body)


def test_gathering_can_be_forbidden() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        x = distribute_tensor(numbers(4, 4), mesh, [Shard(0)])
        with (
            implicit_replication(False),
            pytest.raises(LayoutError, match=r"no sharding rule, and implicit_replication\(False\) forbids"),
        ):
            torch.ops.disttrain_tests.doubled(x, 1.0)

    run_threads(2, body)


def test_a_picture_names_the_ranks_of_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> list[str]:
        mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(numbers(3, 5), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        row = distribute_tensor(numbers(3), mesh, [Replicate(), Shard(0)], src_data_rank=None)
        with pytest.raises(LayoutError, match="a tensor of 3 dims"):
            visualize_sharding(distribute_tensor(numbers(2, 2, 2), mesh, src_data_rank=None))
        with pytest.raises(LayoutError, match="StridedShard"):
            visualize_sharding(
                distribute_tensor(numbers(4), mesh, [Replicate(), StridedShard(0, 2)], src_data_rank=None)
            )
        return [visualize_sharding(x, "weights"), visualize_sharding(row)]

    pictures = run_threads(4, body)[0]
    assert [line.split() for line in pictures[0].splitlines()[:1]] == [["weights"]]
    assert [line.split() for line in pictures[0].splitlines()[2:]] == [
        ["3", "x", "5", "0:3", "3:5"],
        ["0:2", "0", "1"],
        ["2:3", "2", "3"],
    ]
    assert [line.split() for line in pictures[1].splitlines()[1:]] == [["0:2", "2:3"], ["ranks", "0,", "2", "1,", "3"]]
    assert "weights" in capsys.readouterr().out
