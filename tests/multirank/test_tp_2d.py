"""Modules cut by tensor parallel and then by FSDP, on meshes of two and three axes, train as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import DTensor, Placement, Replicate, Shard, StridedShard, distribute_tensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.tp import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.cases.tensor_parallel import Decoder, check_gradients, decoder_plan

VOCAB = 16
SGD = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
ADAM = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True)  # noqa: E731
FUSED = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)  # noqa: E731


def cut_twice(model: Decoder, mesh: DeviceMesh, *, sequence: bool, **options: Any) -> Decoder:
    """By heads and columns along "tp", and by FSDP along the other axes."""
    parallelize_module(model, mesh["tp"], decoder_plan(2, sequence=sequence))
    others = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    for block in model.blocks:
        fully_shard(block, mesh=mesh[others], **options)
    fully_shard(model, mesh=mesh[others], **options)
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))


def own_rows(tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Ranks that share a tensor-parallel module have the same rows."""
    place, count = 0, 1
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name != "tp":
            place, count = place * mesh.shape[axis] + mesh.get_local_rank(axis), count * mesh.shape[axis]
    return tokens.chunk(count)[place]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).double(), tokens.flatten())


def mean_loss(loss: torch.Tensor) -> torch.Tensor:
    total = loss.detach().clone()
    disttrain.all_reduce(total, disttrain.ReduceOp.AVG)
    return total


def assert_trains_alike(
    model: nn.Module,
    reference: nn.Module,
    mesh: DeviceMesh,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = ADAM,
    num_steps: int = 2,
) -> None:
    optimizers = [make_optimizer(one.parameters()) for one in (model, reference)]
    for step in range(num_steps):
        tokens = batch(step)
        loss, expected = loss_of(model, own_rows(tokens, mesh)), loss_of(reference, tokens)
        torch.testing.assert_close(mean_loss(loss), expected.detach())
        loss.backward()
        expected.backward()
        check_gradients(model, reference)
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, reference)]
        torch.testing.assert_close(whole(norms[0]), norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, reference)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same_state(model: nn.Module, reference: nn.Module) -> None:
    expected, state = reference.state_dict(), model.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        torch.testing.assert_close(value.full_tensor(), expected[name], msg=lambda text, name=name: f"{name}: {text}")


def make(*, tied: bool = False) -> Decoder:
    torch.manual_seed(0)
    return Decoder(tied=tied).double()


NAMES = {2: ("dp", "tp"), 3: ("replicate", "dp", "tp")}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return disttrain.init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])


def on_mesh(shape: tuple[int, ...], body: Callable[[DeviceMesh], None]) -> None:
    size = 1
    for extent in shape:
        size *= extent
    run_threads(size, lambda: body(mesh_of(shape)))


@pytest.mark.parametrize(
    ("shape", "sequence", "tied"),
    [
        ((2, 2), False, False),
        ((2, 2, 2), True, True),
        ((1, 4), True, False),
        ((4, 1), False, True),
    ],
    ids=str,
)
def test_a_decoder_trains_as_in_one_process(shape: tuple[int, ...], sequence: bool, tied: bool) -> None:
    alone = make(tied=tied)

    def on_rank(mesh: DeviceMesh) -> None:
        model = cut_twice(copy.deepcopy(alone), mesh, sequence=sequence)
        if tied:
            assert model.head.weight is model.embedding.weight
        assert_trains_alike(model, copy.deepcopy(alone), mesh)

    on_mesh(shape, on_rank)


@pytest.mark.parametrize("optimizer", [SGD, ADAM, FUSED])
def test_optimizers(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    alone = make()

    def on_rank(mesh: DeviceMesh) -> None:
        model = cut_twice(copy.deepcopy(alone), mesh, sequence=True)
        assert_trains_alike(model, copy.deepcopy(alone), mesh, optimizer)

    on_mesh((2, 2), on_rank)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize(("around_shards", "sequence"), [(False, True), (True, False), (True, True)])
def test_activation_checkpointing(around_shards: bool, sequence: bool) -> None:
    alone = make()

    def on_rank(mesh: DeviceMesh) -> None:
        model, reference = copy.deepcopy(alone), copy.deepcopy(alone)
        parallelize_module(model, mesh["tp"], decoder_plan(2, sequence=sequence))
        for name, block in list(model.blocks.named_children()):
            if around_shards:
                fully_shard(block, mesh=mesh["dp"])
            model.blocks.set_submodule(name, Checkpointed(block))
            if not around_shards:
                fully_shard(model.blocks.get_submodule(name), mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        for name, block in list(reference.blocks.named_children()):
            reference.blocks.set_submodule(name, Checkpointed(block))
        assert_trains_alike(model, reference, mesh)

    on_mesh((2, 2), on_rank)


@pytest.mark.parametrize("synced", [False, True])
def test_gradients_accumulate(synced: bool) -> None:
    alone = make(tied=True)

    def on_rank(mesh: DeviceMesh) -> None:
        reference = copy.deepcopy(alone)
        model = cut_twice(copy.deepcopy(alone), mesh, sequence=True)
        for step in range(3):
            model.set_requires_gradient_sync(synced or step == 2)
            loss_of(model, own_rows(batch(step), mesh)).backward()
            loss_of(reference, batch(step)).backward()
        check_gradients(model, reference)

    on_mesh((2, 2), on_rank)


@pytest.mark.parametrize("sequence", [False, True])
def test_mixed_precision(sequence: bool) -> None:
    """Parameters of 32 bits, computed with in 16, their gradients reduced in 32: nearly the same."""
    alone = make().float()

    def on_rank(mesh: DeviceMesh) -> None:
        reference = copy.deepcopy(alone)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = cut_twice(copy.deepcopy(alone), mesh, sequence=sequence, mp_policy=policy)
        dtypes = []
        model.blocks[0].mlp.gate.register_forward_hook(lambda _m, _x, y: dtypes.append(y.dtype))
        loss, expected = loss_of(model, own_rows(batch(0), mesh)), loss_of(reference, batch(0))
        torch.testing.assert_close(mean_loss(loss), expected.detach(), rtol=0.01, atol=0.01)
        loss.backward()
        expected.backward()
        assert dtypes == [torch.bfloat16]
        own = dict(model.named_parameters())
        for name, parameter in reference.named_parameters():
            grad = own[name].grad.full_tensor()
            assert grad.dtype == torch.float32
            assert (grad - parameter.grad).norm() < 0.03 * parameter.grad.norm() + 1e-4, name

    on_mesh((2, 2), on_rank)


class Fused(nn.Module):
    """Query, key and value in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(6, 3 * 8)
        self.out = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.all(x).chunk(3, dim=-1)
        return self.out(q * k.sigmoid() + v)


FUSED_PLAN = {"all": ColwiseParallel(num_blocks=3), "out": RowwiseParallel()}


def test_blocks_are_cut_along_another_dim_by_fsdp() -> None:
    """Pieces of three blocks are no consecutive rows, and could not be cut once more along these."""
    torch.manual_seed(0)
    alone = Fused().double()

    def on_rank(mesh: DeviceMesh) -> None:
        model, reference = copy.deepcopy(alone), copy.deepcopy(alone)
        parallelize_module(model, mesh["tp"], FUSED_PLAN)
        with pytest.raises(ShardingError, match=r"all\.weight") as found:
            fully_shard(model, mesh=mesh["dp"])
        assert "shard_placement_fn" in str(found.value)
        assert type(model) is Fused

        def other_dim(parameter: nn.Parameter) -> Placement | None:
            strided = isinstance(parameter, DTensor) and isinstance(parameter.placements[0], StridedShard)
            return Shard(1) if strided else None

        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=other_dim)
        assert model.all.weight.placements == (Shard(1), StridedShard(0, 3))
        assert model.all.bias.placements == (Shard(0), Replicate())
        assert model.out.weight.placements == (Shard(0), Shard(1))
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            model(x.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
            reference(x).square().mean().backward()
            check_gradients(model, reference)
        assert_same_state(model, reference)

    on_mesh((2, 2), on_rank)


def test_pieces_of_pieces_are_cut_once_more() -> None:
    """Two axes that have cut one dim, the later one first, leave each rank consecutive rows."""
    weight = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def on_rank() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
        layer = nn.Linear(3, 16, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(weight, mesh["ep", "tp"], [StridedShard(0, 2), Shard(0)]))
        fully_shard(layer, mesh=mesh["dp"])
        assert layer.weight.placements == (StridedShard(0, 4), StridedShard(0, 2), Shard(0))
        assert torch.equal(layer.weight.full_tensor(), weight)

    run_threads(8, on_rank)
