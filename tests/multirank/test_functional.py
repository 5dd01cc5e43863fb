"""Functional collectives: values and gradients are those of one process that holds all ranks' tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pytest
import torch

import disttrain
from disttrain.errors import GroupError, ShapeError
from disttrain.process_group import functional as F
from disttrain.testing.pytest_plugin import on_ranks

Tensors = list[torch.Tensor]
SPLITS = [[1, 3, 0], [2, 1, 4], [0, 2, 1]]  # SPLITS[source][target] rows


def all_inputs(num_ranks: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """Every rank's input, known to every rank; with zeros and with values that ranks share."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(-2, 4, shape, generator=generator).to(dtype) for _ in range(num_ranks)]


def reduced(values: Tensors, op: str) -> torch.Tensor:
    stacked = torch.stack(values)
    folds: dict[str, Callable[[], torch.Tensor]] = {
        "sum": lambda: stacked.sum(0),
        "avg": lambda: stacked.mean(0),
        "product": lambda: stacked.prod(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
    }
    return folds[op]()


def loss(output: torch.Tensor, rank: int) -> torch.Tensor:
    """Different on each rank, and not linear."""
    weights = torch.arange(output.numel(), dtype=output.dtype).view(output.shape) + rank
    return (weights * output + 0.1 * output * output).sum()


Case = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Tensors], Tensors]]
"""A function of this rank's input, and what maps all ranks' inputs to all ranks' outputs."""


def check(cases: Sequence[Case], inputs: Tensors, backend: str | None = None) -> None:
    """Each function against what is computed alone; those that are compiled all in one graph, which takes less time."""
    for together in [[case] for case in cases] if backend is None else [cases]:
        check_together(together, inputs, backend)


def check_together(cases: Sequence[Case], inputs: Tensors, backend: str | None) -> None:
    rank = disttrain.get_rank()
    mine = inputs[rank].clone().requires_grad_()
    everyone = [tensor.clone().requires_grad_() for tensor in inputs]

    def outputs_of(tensor: torch.Tensor) -> Tensors:
        return [function(tensor) for function, _ in cases]

    if backend is not None:
        torch._dynamo.reset()
        outputs_of = torch.compile(outputs_of, backend=backend, fullgraph=True)
    outputs = outputs_of(mine)
    expected = [alone(everyone) for _, alone in cases]
    losses, expected_losses = [], []
    for place, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert output.shape == wanted[rank].shape
        torch.testing.assert_close(
            F.wait_tensor(output), wanted[rank], msg=lambda text, place=place: f"case {place}: {text}"
        )
        # A factor of each case's own: no gradient is taken for another.
        losses.append(loss(output, rank) * (place + 1))
        expected_losses += [loss(each, other) * (place + 1) for other, each in enumerate(wanted)]
    reduce(torch.add, losses).backward()
    reduce(torch.add, expected_losses).backward()
    assert mine.grad is not None
    assert type(mine.grad) is torch.Tensor
    expected_grad = everyone[rank].grad
    torch.testing.assert_close(mine.grad, torch.zeros_like(mine) if expected_grad is None else expected_grad)


def all_reduces() -> tuple[list[Case], Tensors]:
    size = disttrain.get_world_size()

    def case(op: str) -> Case:
        return lambda tensor: F.all_reduce(tensor, op, None), lambda tensors: [reduced(tensors, op)] * size

    return [case(op) for op in ("sum", "avg", "product", "min", "max")], all_inputs(size, 3, 4)


def reduce_scatters(pairs: Sequence[tuple[str, int]]) -> tuple[list[Case], Tensors]:
    size = disttrain.get_world_size()

    def case(op: str, dim: int) -> Case:
        return (
            lambda tensor: F.reduce_scatter_tensor(tensor, op, dim),
            lambda tensors: list(reduced(tensors, op).chunk(size, dim)),
        )

    return [case(op, dim) for op, dim in pairs], all_inputs(size, 6, 6)


def all_gathers() -> tuple[list[Case], Tensors]:
    size = disttrain.get_world_size()

    def case(dim: int) -> Case:
        return lambda tensor: F.all_gather_tensor(tensor, dim), lambda tensors: [torch.cat(tensors, dim)] * size

    return [case(dim) for dim in (0, 1, -1)], all_inputs(size, 2, 3)


def to_others() -> tuple[list[Case], Tensors]:
    size = disttrain.get_world_size()
    targets = [(rank + 1) % size for rank in range(size)]
    cases: list[Case] = [
        (lambda tensor: F.broadcast(tensor, size - 1), lambda tensors: [tensors[-1].clone() for _ in tensors]),
        (
            lambda tensor: F.permute_tensor(tensor, targets),
            lambda tensors: [tensors[targets.index(rank)] for rank in range(size)],
        ),
        (
            lambda tensor: F.all_to_all_single(tensor, None, None),
            lambda tensors: [torch.cat([tensor.chunk(size)[rank] for tensor in tensors]) for rank in range(size)],
        ),
    ]
    return cases, all_inputs(size, 2 * size, 2)


def uneven_all_to_all() -> tuple[list[Case], Tensors]:
    rank = disttrain.get_rank()
    sent, received = SPLITS[rank], [splits[rank] for splits in SPLITS]

    def alone(tensors: Tensors) -> Tensors:
        parts = [tensor.split(splits) for tensor, splits in zip(tensors, SPLITS, strict=True)]
        return [torch.cat([part[target] for part in parts]) for target in range(3)]

    inputs = [all_inputs(1, sum(splits), 2)[0] + source for source, splits in enumerate(SPLITS)]
    return [(lambda tensor: F.all_to_all_single(tensor, received, sent), alone)], inputs


OPS, DIMS = ("sum", "avg", "product", "max"), (0, 1, -1)


@on_ranks(2, 3)
def test_values_and_gradients() -> None:
    check(*all_reduces())
    check(*reduce_scatters(list(itertools.product(OPS, DIMS))))
    check(*all_gathers())
    check(*to_others())
    if disttrain.get_world_size() == 3:
        check(*uneven_all_to_all())


@on_ranks(2)
def test_compiled_reductions_and_gathers() -> None:
    check(*all_reduces(), "aot_eager")
    # A graph holds op and dim as constants: each of them once will do, for compiling takes its time.
    check(*reduce_scatters(list(zip(OPS, itertools.cycle(DIMS), strict=False))), "aot_eager")
    check(*all_gathers(), "aot_eager")


@on_ranks(3)
def test_compiled_transfers() -> None:
    """Of two ranks each could be taken for the other's source as well as for its target."""
    check(*to_others(), "aot_eager")
    check(*uneven_all_to_all(), "aot_eager")


@on_ranks(2)
def test_a_gradient_has_a_gradient() -> None:
    rank = disttrain.get_rank()
    tensor = torch.tensor([1.0 + rank, 3.0], dtype=torch.float64, requires_grad=True)
    output = F.all_reduce(tensor * tensor, "sum")
    (grad,) = torch.autograd.grad(output.sum(), tensor, create_graph=True)
    assert grad.tolist() == [4.0 * (1 + rank), 12.0]
    F.all_reduce(grad, "sum").sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [8.0, 8.0]


@on_ranks(2)
def test_a_result_waits_when_it_is_used_and_not_before() -> None:
    rank = disttrain.get_rank()
    group = disttrain.new_group(timeout=20)
    disttrain.barrier(group)
    if rank == 1:
        # Rank 0 has its results and reads their shapes before this rank has started anything.
        disttrain.barrier()
    outputs = [F.all_reduce(torch.full((2, 3), 1.0 + step), "sum", group) for step in range(3)]
    if rank == 0:
        assert [type(output) for output in outputs] == [F.AsyncCollectiveTensor] * 3
        assert [output.shape for output in outputs] == [(2, 3)] * 3
        assert [output.is_completed() for output in outputs] == [False] * 3  # type: ignore[attr-defined]
        assert "under way" in repr(outputs[0])
        disttrain.barrier()
    assert outputs[0].tolist() == [[2.0] * 3] * 2
    assert type(outputs[1] + 1) is torch.Tensor
    assert (outputs[1] + 1).eq(5).all()
    assert F.wait_tensor(outputs[2]).numpy().sum() == 36.0
    assert "there" in repr(outputs[2])


@on_ranks(2)
def test_a_result_may_go_into_another_collective_at_once() -> None:
    first = F.all_reduce(torch.ones(4), "sum")
    disttrain.all_reduce(first)  # in place, on what is not there yet
    assert first.tolist() == [4.0] * 4
    gathered = torch.empty(8)
    disttrain.all_gather_into_tensor(gathered, F.all_reduce(torch.ones(4), "sum"))
    assert gathered.tolist() == [2.0] * 8
    chained = F.all_gather_tensor(F.reduce_scatter_tensor(torch.ones(4), "sum", 0), 0)
    assert chained.tolist() == [2.0] * 4


@on_ranks(2)
def test_groups_by_mesh_axis_and_whole_mesh() -> None:
    rank = disttrain.get_rank()
    mesh = disttrain.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    row = torch.tensor([float(rank)])
    # A mesh that was not used before may be used in a graph: nothing of it is made there.
    compiled = torch.compile(lambda tensor: F.all_reduce(tensor, "sum", (mesh, "tp")), backend="eager", fullgraph=True)
    assert compiled(row).tolist() == [1.0]
    assert F.all_gather_tensor(row, 0, (mesh, "tp")).tolist() == [0.0, 1.0]
    assert F.all_gather_tensor(row, 0, (mesh, 0)).tolist() == [float(rank)]
    assert F.all_reduce(row, disttrain.ReduceOp.MAX, mesh["tp"]).tolist() == [1.0]


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_other_dtypes_and_nothing_at_all(dtype: str) -> None:
    rank = disttrain.get_rank()
    tensor = torch.tensor([[rank], [1]]).to(getattr(torch, dtype))
    others = torch.tensor([[1 - rank], [1]]).to(tensor.dtype)
    assert torch.equal(F.permute_tensor(tensor, [1, 0]), others)
    assert torch.equal(F.broadcast(tensor.T, 1)[0, :1], tensor.new_tensor([1]))
    assert F.all_gather_tensor(tensor[:0], 0).shape == (0, 1)
    assert F.reduce_scatter_tensor(torch.empty(0, 3), "sum", 0).shape == (0, 3)


@pytest.mark.sweep(0)
@on_ranks(2, timeout_s=360)
def test_compiled_by_inductor() -> None:
    rank = disttrain.get_rank()

    def step(tensor: torch.Tensor) -> torch.Tensor:
        # What is started first is used last: memory that is free in between must not be the collective's.
        gathered = F.all_gather_tensor(tensor.sin(), 0)
        total = F.all_reduce(tensor * 2, "avg")
        part = F.reduce_scatter_tensor(gathered.cos() + 1, "sum", 0)
        return (total.exp() + part).sum() + gathered.tanh().sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        for _ in range(3):
            tensor = (torch.arange(64.0).view(8, 8) / 64 + rank).requires_grad_()
            value = function(tensor)
            value.backward()
            results.append((value.detach(), tensor.grad))
    for value, grad in results[1:]:
        torch.testing.assert_close(value, results[0][0])
        torch.testing.assert_close(grad, results[0][1])
    waiting = F.all_reduce(torch.ones(3), "sum")
    assert torch.compile(lambda tensor: tensor * 3, backend="aot_eager", fullgraph=True)(waiting).tolist() == [6.0] * 3


def mistakes(rank: int) -> Sequence[tuple[type[Exception], str, Callable[[], Any]]]:
    ones = torch.ones(3)
    return [
        (ShapeError, "there is no reduction 'mean'. Known are sum", lambda: F.all_reduce(ones, "mean")),
        (ShapeError, "dim 0 has size 3, the group 2 ranks", lambda: F.reduce_scatter_tensor(ones, "sum", 0)),
        (ShapeError, r"shape \(3,\) has no dim 1", lambda: F.all_gather_tensor(ones, 1)),
        (ShapeError, r"shape \(\) has no dim 0", lambda: F.all_gather_tensor(torch.tensor(1.0), 0)),
        (ShapeError, "3 rows don't divide evenly", lambda: F.all_to_all_single(ones, None, None)),
        (ShapeError, "add up to its rows", lambda: F.all_to_all_single(ones, [1, 1], [1, 1])),
        (ShapeError, "not a permutation", lambda: F.permute_tensor(ones, [0, 0])),
        (GroupError, "group rank 2 is out of range", lambda: F.broadcast(ones, 2)),
        (GroupError, "not a member", lambda: F.all_reduce(ones, "sum", disttrain.NON_GROUP_MEMBER)),
        (GroupError, "no collective is under way", lambda: disttrain.current_world().take_pending(999)),
        (GroupError, "no group 'gone' in this world; it has", lambda: torch.ops.disttrain.broadcast(ones, 0, "gone")),
    ]


@on_ranks(2)
def test_each_mistake_gets_one_clear_error_and_nobody_waits() -> None:
    rank = disttrain.get_rank()
    for kind, rule, attempt in mistakes(rank):
        with pytest.raises(kind, match=rule) as caught:
            attempt()
        assert f"[rank {rank}" in str(caught.value), str(caught.value)
    disttrain.barrier()


@on_ranks(2, 3)
def test_several_at_once_and_torchs_other_names() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    mine = [torch.full((size, 2), rank + 1.0), torch.full((1, size), float(rank))]
    totals = [size * (size + 1) / 2, size * (size - 1) / 2]
    summed = F.all_reduce_coalesced(mine, "sum", disttrain.group.WORLD)
    assert [tensor.unique().item() for tensor in summed] == totals
    gathered = F.all_gather_into_tensor_coalesced(mine, disttrain.group.WORLD.group_name)  # type: ignore[union-attr]
    assert [tensor.shape for tensor in gathered] == [(size * size, 2), (size, size)]
    assert gathered[1][:, 0].tolist() == list(range(size))
    parts = F.reduce_scatter_tensor_coalesced(mine, "sum", [0, 1])
    assert [(tuple(tensor.shape), tensor[0, 0].item()) for tensor in parts] == [
        ((1, 2), totals[0]),
        ((1, 1), totals[1]),
    ]
    with pytest.raises(ShapeError, match=r"scatter_dim has 1 dims for 2 tensors"):
        F.reduce_scatter_tensor_coalesced(mine, "sum", [0])
    with pytest.raises(GroupError, match=r"there is no group 'nobody'"):
        F.all_reduce(mine[0], "sum", "nobody")
    leaf = torch.ones(2, requires_grad=True)
    F.all_gather_tensor_autograd(leaf, 0).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [size, size]
    F.reduce_scatter_tensor_autograd(leaf.repeat(size), "sum", 0).sum().backward()
    assert leaf.grad.tolist() == [2 * size, 2 * size]


@on_ranks(2)
def test_names_that_programs_have_from_torchs_own_files() -> None:
    rank = disttrain.get_rank()
    output = torch.empty(2)
    disttrain._all_gather_base(output, torch.tensor([float(rank)]))
    assert output.tolist() == [0, 1]
    part = torch.empty(1)
    disttrain._reduce_scatter_base(part, output)
    assert part.item() == 2 * rank
    with disttrain._coalescing_manager(group=disttrain.GroupMember.WORLD, async_ops=True) as both:
        disttrain.all_reduce(part)
        disttrain.all_reduce(output)
    both.wait()
    assert (part.item(), output.tolist()) == (2, [0, 2])
    assert disttrain._resolve_process_group(disttrain.group.WORLD.group_name) is disttrain.group.WORLD
    pair = disttrain.new_group([1, 0], sort_ranks=False)
    message = disttrain.P2POp(disttrain.isend, part, group=pair, group_peer=rank)  # type: ignore[arg-type]
    assert (message.peer, message.group_peer) == (1 - rank, rank)
    alone = disttrain.new_group([0])
    assert (alone == disttrain.GroupMember.NON_GROUP_MEMBER) == (rank == 1)
