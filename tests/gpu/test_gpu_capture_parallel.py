"""Steps over several ranks, recorded once and replayed: the values of steps that run as they are, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain import kernels
from disttrain.compiling import capture_step, compile_blocks
from disttrain.errors import CollectiveMismatchError, CompileError, DisttrainError
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from disttrain.pipelining import PipelineStage, get_schedule_class
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from tests.gpu.ranks import NUM_GPU_RANKS

DIM, NUM_STEPS = 64, 10
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
Step = Callable[..., torch.Tensor]


class Block(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.is_checkpointed = is_checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result
        return self.inner(x)


class Model(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(is_checkpointed) for _ in range(3))
        self.unused = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model_of(is_checkpointed: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(is_checkpointed).cuda()


def batch(index: int, is_same: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Another one on each rank, or the same."""
    generator = torch.Generator().manual_seed(index + (0 if is_same else 1000 * disttrain.get_rank()))
    x = torch.randn(16, DIM, generator=generator).cuda()
    return x, x.roll(1, 0).tanh()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def assert_alike(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], rtol: float = 0.0) -> None:
    """Two trainings, one captured, with a step as it is in between."""
    model, optimizer = make()
    plain = step_of(model, optimizer)
    expected = [plain(*batch(index)).item() for index in range(NUM_STEPS)]
    other, optimizer = make()
    step = step_of(other, optimizer)
    captured = capture_step(step)
    steps = [step if index == 7 else captured for index in range(NUM_STEPS)]
    losses = [each(*batch(index)).item() for index, each in enumerate(steps)]
    assert losses == pytest.approx(expected, rel=rtol, abs=0.0), f"{losses} against {expected}"
    assert captured.num_graphs == 1
    for parameter, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert rtol or torch.equal(local(parameter), local(wanted))


def local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def sharded(model: nn.Module, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    for block in model.blocks:
        fully_shard(block, **{"mp_policy": POLICY, **options})
    fully_shard(model, **{"mp_policy": POLICY, **options})
    return model, kernels.AdamW(model.parameters(), lr=1e-2, max_norm=1.0)


def world_mesh(shape: tuple[int, ...], *names: str) -> Any:
    return disttrain.init_device_mesh("cuda", shape, mesh_dim_names=names)


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("way", ["copies", "neighbours", "never", "frozen", "checkpointed", "compiled"])
def test_fully_shard(way: str) -> None:
    torch._dynamo.reset()
    size = disttrain.get_world_size()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = model_of(is_checkpointed=way == "checkpointed")
        if way == "frozen":
            model.blocks[1].up.requires_grad_(False)
        if way == "compiled":
            compile_blocks(model)
        options: dict[str, Any] = {"mesh": world_mesh((size,), "dp")}
        if way == "copies":
            options["mesh"] = world_mesh((size, 1), "copies", "shards")
        if way in ("neighbours", "never"):
            options["reshard_after_forward"] = 1 if way == "neighbours" and size > 1 else False
        return sharded(model, **options)

    assert_alike(make)


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_float8(is_compiled: bool) -> None:
    torch._dynamo.reset()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = model_of()
        kernels.use_float8(model, num_tokens=None, report=lambda _: None)
        kernels.use_kernels(model, report=lambda _: None)
        if is_compiled:
            compile_blocks(model)
        return sharded(model, mesh=world_mesh((disttrain.get_world_size(),), "dp"))

    assert_alike(make)


def cut(model: Model, axis: Any) -> Model:
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=disttrain.dtensor.Shard(0)),
            "down": RowwiseParallel(output_layouts=disttrain.dtensor.Shard(0)),
        }
        parallelize_module(block, axis, plan)
    return model


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_tensor_parallel(is_sharded: bool, is_compiled: bool) -> None:
    torch._dynamo.reset()
    mesh = world_mesh((1, disttrain.get_world_size()), "dp", "tp")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = cut(model_of(), mesh["tp"])
        del model.unused
        if is_compiled:
            compile_blocks(model)
        if is_sharded:
            return sharded(model, mesh=mesh["dp"])
        return model, kernels.AdamW(model.parameters(), lr=1e-2)

    # Two compilations of the cut model differ in the last bit, captured or not.
    assert_alike(make, rtol=1e-6 if is_compiled else 0.0)


@on_ranks(2)
@pytest.mark.skipif(NUM_GPU_RANKS < 2, reason="needs two ranks")
@pytest.mark.parametrize("copy_engines", [True, False])
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_a_schedule_of_a_rank(name: str, copy_engines: bool) -> None:
    rank = disttrain.get_rank()
    kind: Any = get_schedule_class(name)
    places = (rank,) if name == "1F1B" else (rank, 3 - rank)
    num_stages = 2 * len(places)
    torch.manual_seed(0)
    layers = [Block().cuda() for _ in range(num_stages)]

    def make() -> tuple[Step, list[nn.Module]]:
        stages = [PipelineStage(copy.deepcopy(layers[place]), place, num_stages, "cuda") for place in places]
        schedule = kind(stages, 4, loss_fn=F.mse_loss, copy_engines=copy_engines)
        modules = [stage.submod for stage in stages]
        optimizer = kernels.AdamW([each for module in modules for each in module.parameters()], lr=1e-2)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            losses: list[torch.Tensor] = []
            schedule.step(x, target=y, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).mean() if losses else x.sum()

        return step, modules

    plain, modules = make()
    expected = [plain(*batch(index, is_same=True)).item() for index in range(NUM_STEPS)]
    step, others = make()
    captured = capture_step(step, modules=others)
    losses = [captured(*batch(index, is_same=True)).item() for index in range(NUM_STEPS)]
    assert losses == expected, f"{losses} against {expected}"
    assert captured.num_graphs == 1
    for module, wanted in zip(others, modules, strict=True):
        for parameter, other in zip(module.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(parameter, other)


@on_ranks(NUM_GPU_RANKS)
def test_offload_is_refused() -> None:
    model, optimizer = sharded(
        model_of(), mesh=world_mesh((disttrain.get_world_size(),), "dp"), offload_policy=CPUOffloadPolicy()
    )
    captured = capture_step(step_of(model, optimizer), num_warmups=1)
    captured(*batch(0))
    with pytest.raises(CompileError, match="CPUOffloadPolicy"):
        captured(*batch(1))


@on_ranks(NUM_GPU_RANKS)
def test_a_destroyed_group_is_told_and_waits_for_no_graph() -> None:
    group = disttrain.new_group(list(range(disttrain.get_world_size())))

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        disttrain.all_reduce(y, group=group)
        return y

    captured = capture_step(step, num_warmups=1)
    for _ in range(3):
        captured(batch(0)[0])
    assert captured.num_graphs == 1
    disttrain.destroy_process_group(group)
    with pytest.raises(DisttrainError, match="destroyed"):
        captured(batch(0)[0])


@on_ranks(2)
@pytest.mark.skipif(NUM_GPU_RANKS < 2, reason="needs two ranks")
@pytest.mark.parametrize("kind", ["sizes", "fewer", "fails"])
def test_ranks_that_record_different_things_all_hear_so(kind: str) -> None:
    is_odd = disttrain.get_rank() == 1

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        is_other = is_odd and torch.cuda.is_current_stream_capturing()
        disttrain.all_reduce(y[:2] if is_other and kind == "sizes" else y)
        if is_other and kind == "fails":
            y.sum().item()
        if not (is_other and kind == "fewer"):
            disttrain.all_reduce(y)
        return y

    captured = capture_step(step, num_warmups=1)
    x = batch(0, is_same=True)[0]
    expected = captured(x)
    words = {
        "sizes": r"collective 1 .*sizes: ",
        "fewer": "rank 1 recorded no more than 1",
        "fails": "it has the host wait",
    }
    with pytest.raises(CompileError if kind == "fails" else CollectiveMismatchError, match=words[kind]):
        captured(x)
    assert captured.num_graphs == 0
    assert torch.equal(step(x), expected)
