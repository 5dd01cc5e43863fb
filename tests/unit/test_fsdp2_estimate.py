"""What `estimate` says is what a step takes, to a byte in what is sent and held, nearly so at the peak."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import disttrain
from disttrain import kernels
from disttrain.dtensor import DTensor, Replicate, Shard, distribute_tensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import (
    CPUOffloadPolicy,
    Estimate,
    MixedPrecisionPolicy,
    TransferCost,
    TransferPolicy,
    estimate,
    fully_shard,
)
from disttrain.fsdp2.transfers import forms
from disttrain.process_group import Call, World, entered_world
from disttrain.store import HashStore
from tests.cases.fsdp2 import Halved

# torch warns of Intel GPUs when oneDNN is switched off.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")

NUM_RANKS = 8
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Block(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Large beside its activations, for it sees two tokens."""

    def __init__(self, *, is_tied: bool = False, vocab: int = 1003, dim: int = 99, hidden: int = 411) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(4))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.fixture(autouse=True)
def world() -> Iterator[World]:
    """Of ranks that are not there: shapes, and so sizes, are right."""
    made = World(HashStore(), 0, NUM_RANKS, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    # On some processors oneDNN copies bfloat16 matrices into a form of its own; that is no memory of ours.
    with entered_world(made), torch.backends.mkldnn.flags(enabled=False):
        yield made


def shard(model: Model, **options: object) -> Model:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


class Wire:
    """Adds up what each collective sends round a ring, by operation and number of ranks."""

    def __init__(self) -> None:
        self.num_calls: Counter[tuple[str, int]] = Counter()
        self.num_collectives: Counter[tuple[str, int]] = Counter()
        self.sent_bytes: Counter[tuple[str, int]] = Counter()

    def enqueued(self, call: Call) -> None:
        operation = call.operation.removesuffix("_coalesced").removesuffix("_into_tensor").removesuffix("_tensor")
        whole = call.outputs if operation == "all_gather" else call.inputs
        num_bytes = sum(tensor.nbytes for tensor in whole) * (2 if operation == "all_reduce" else 1)
        kind = operation, call.group.size()
        self.num_calls[kind] += 1
        self.num_collectives[kind] += len(whole)
        self.sent_bytes[kind] += num_bytes * (kind[1] - 1) // kind[1]

    def completed(self, call: Call, error: Exception | None) -> None:
        """Only the beginning is counted."""


def peak_of(run: Callable[[], None]) -> int:
    """The most bytes that `run` has from the allocator at one time, but for what packing pads within its kernel."""
    # What an earlier test has left would be seen to go.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        run()
    assert record.profiler is not None
    events = record.profiler.kineto_results.events()
    inner = [(e.start_ns(), e.end_ns()) for e in events if e.name() == "aten::_chunk_cat"]
    total = peak = 0
    for when, num_bytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        if not any(start <= when <= end for start, end in inner):
            total += num_bytes
            peak = max(peak, total)
    return peak


def check(
    model: Model,
    said: Estimate,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    world: World,
    *,
    num_microbatches: int = 1,
    reduces_each: bool = True,
) -> None:
    """Train for three steps, and compare the last with what was said."""
    optimizer = make_optimizer(model.parameters())
    tokens = torch.tensor([[1, 2]])

    def step() -> None:
        for micro in range(num_microbatches):
            model.set_requires_gradient_sync(reduces_each or micro == num_microbatches - 1)
            model(tokens).float().logsumexp(-1).mean().backward()

    for _ in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad()
    wire = Wire()
    world.add_observer(wire)
    peak = peak_of(step)
    world.remove_observer(wire)
    assert said.peak.num_bytes == pytest.approx(peak, rel=0.01)
    assert {(each.operation, each.num_ranks): each.num_calls for each in said.traffic} == wire.num_calls
    assert {(each.operation, each.num_ranks): each.num_collectives for each in said.traffic} == wire.num_collectives
    assert {(each.operation, each.num_ranks): each.sent_bytes for each in said.traffic} == wire.sent_bytes
    assert said.wire_bytes == wire.sent_bytes.total()
    assert said.parameters_bytes == storage_bytes(model.parameters())
    assert said.gradients_bytes == storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
    # All ranks make room for padding in parameters and gradients; an optimizer does not, and rank 0 has none.
    assert said.optimizer_bytes == sum(
        local(value).nbytes for kept in optimizer.state.values() for value in kept.values() if value.ndim
    )
    assert said.resting_bytes == said.parameters_bytes + said.optimizer_bytes
    assert said.peak_bytes == said.resting_bytes + said.peak.num_bytes


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    storages = {local(tensor).untyped_storage().data_ptr(): local(tensor).untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def cut_last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.ndim > 1 else None


OPTIONS = {
    "plain": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "bf16, reduced in fp32": {"mp_policy": BF16},
    "whole until backward": {"reshard_after_forward": False},
    "root freed, too": {"reshard_after_forward": True},
    "kept on pairs": {"reshard_after_forward": 2, "mp_policy": BF16},
    "cut along the last dim": {"shard_placement_fn": cut_last_dim},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "in place": {"transfer_policy": TransferPolicy("in_place")},
    "what is large in place": {"transfer_policy": TransferPolicy("mixed"), "mp_policy": BF16},
    "two together": {"transfer_policy": TransferPolicy(together=2)},
    "three together, reduced apart": {"transfer_policy": TransferPolicy(None, 3, True), "mp_policy": BF16},
    "all together, offloaded": {"transfer_policy": TransferPolicy(together=9), "offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_takes_what_was_said(
    options: dict[str, object], is_tied: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Matrices are large, and what has one dim is not.
    monkeypatch.setattr(forms, "COPY_BYTES_PER_S", 4096 / forms.HOST_COLLECTIVE_S)
    model = Model(is_tied=is_tied)
    before = estimate(model, blocks=model.blocks, **options)
    with torch.device("meta"):
        without_memory = Model(is_tied=is_tied)
    assert estimate(without_memory, blocks=without_memory.blocks, **options) == before
    assert type(model) is Model
    shard(model, **options)
    assert estimate(model) == before
    check(model, before, torch.optim.AdamW, world)
    assert estimate(model) == before


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=["plain", "bf16"])
def test_copies_beside_shards(options: dict[str, object], world: World) -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    model = Model()
    said = estimate(model, mesh, blocks=model.blocks, **options)
    assert {(each.operation, each.num_ranks) for each in said.traffic} == {
        ("all_gather", 4),
        ("reduce_scatter", 4),
        ("all_reduce", 2),
    }
    check(shard(model, mesh=mesh, **options), said, torch.optim.AdamW, world)


@pytest.mark.parametrize("part_bytes", [1, 2**40])
def test_a_root_that_is_reduced_part_by_part(part_bytes: int, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "PART_BYTES", part_bytes)
    model = shard(Model())
    said = estimate(model)
    assert sum(each.num_calls for each in said.traffic if each.operation == "reduce_scatter") == (
        4 + (3 if part_bytes == 1 else 1)
    )
    check(model, said, torch.optim.AdamW, world)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("reduces_each", [False, True])
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=["plain", "bf16"])
def test_gradients_of_several_microbatches(
    options: dict[str, object], reduces_each: bool, is_tied: bool, world: World
) -> None:
    model = shard(Model(is_tied=is_tied), **options)
    micros = {"num_microbatches": 3, "reduces_each": reduces_each}
    said = estimate(model, **micros)
    assert said.traffic != estimate(model).traffic
    check(model, said, torch.optim.AdamW, world, **micros)


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(99))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


def test_what_a_backward_does_not_need_is_kept_for_none(world: World) -> None:
    model = Model()
    model.blocks[1] = Offset()
    shard(model, reshard_after_forward=2)
    model.blocks[1].set_unshard_in_backward(False)
    check(model, estimate(model, num_microbatches=2), torch.optim.AdamW, world, num_microbatches=2)


def test_frozen_and_ignored_parameters_and_several_dtypes(world: World) -> None:
    model = Model()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    model.norm.double()
    model.norm.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    model.norm.register_forward_hook(lambda _, args, output: output.float())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, ignored_params={model.head.weight})
    said = estimate(model)
    assert said.gradients_bytes < said.parameters_bytes
    check(model, said, torch.optim.AdamW, world)


def test_parameters_that_say_what_is_gathered_of_them(world: World) -> None:
    model = Model(dim=96, hidden=416)
    without = estimate(model, blocks=model.blocks, mp_policy=BF16)
    for block in model.blocks:
        block.down.__class__ = Halved
    said = estimate(model, blocks=model.blocks, mp_policy=BF16)
    # Four bytes of a number take sixteen, of each block, for its forward and its backward.
    assert said.wire_bytes == without.wire_bytes + 4 * 2 * 16 * (NUM_RANKS - 1)
    check(shard(model, mp_policy=BF16), said, torch.optim.AdamW, world)


def test_between_hosts_they_are_in_the_same_messages(world: World) -> None:
    network = TransferCost(0.002, 3e9)
    world.default_group.spans_hosts, world.default_group.transfer_cost = True, network
    model = Model(dim=96, hidden=416)
    within = estimate(model, blocks=model.blocks, mp_policy=BF16)
    for block in model.blocks:
        block.down.__class__ = Halved
    said = estimate(model, blocks=model.blocks, mp_policy=BF16, network=network)
    assert sum(each.num_calls for each in said.traffic) < sum(each.num_calls for each in within.traffic)
    assert "gathered together: 5 modules; reductions by a communicator of their own" in str(said)
    model = shard(model, mp_policy=BF16)
    check(model, said, torch.optim.AdamW, world)
    assert estimate(model) == said


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weights_in_float8_are_gathered_as_one_byte_each(recipe: str, world: World) -> None:
    model = nn.Sequential(nn.Linear(96, 416, bias=False), nn.Linear(416, 96))
    kernels.use_float8(model, recipe, report=lambda _: None)
    (gathered,) = [each for each in estimate(model[0], mp_policy=BF16).traffic if each.operation == "all_gather"]
    rows = 416 // NUM_RANKS
    scales = 4 * (rows if recipe == "rowwise" else 4)  # one scale fills what the next input begins after
    assert gathered.sent_bytes == (NUM_RANKS - 1) * (rows * 96 + scales)


def test_nested_modules_and_what_the_user_prefetches(world: World) -> None:
    model = Model()
    for block in model.blocks:
        fully_shard(block.up)
    shard(model)
    first, second, third, _ = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    check(model, estimate(model), torch.optim.AdamW, world)


sgd = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    ("cost", "make", "expected"),
    [(torch.optim.SGD, torch.optim.SGD, 0), (sgd, sgd, 4), (torch.optim.Adagrad, torch.optim.Adagrad, 4), (4, sgd, 4)],
)
def test_optimizers(cost: object, make: Callable[..., torch.optim.Optimizer], expected: int, world: World) -> None:
    model = shard(Model())
    said = estimate(model, optimizer=cost)
    assert said.optimizer_bytes == pytest.approx(expected * said.parameters_bytes / 4, rel=0.02)
    check(model, said, make, world)


def test_parameters_of_another_parallelism_too(world: World) -> None:
    mesh = disttrain.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(64, 32, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [Shard(0)]))
    before = estimate(linear, mesh["dp"])
    fully_shard(linear, mesh=mesh["dp"])
    assert estimate(linear) == before
    assert before.parameters_bytes == linear.weight.to_local().untyped_storage().nbytes() == 64 * 32 * 4 // 8
    x = DTensor.from_local(torch.ones(1, 64), mesh["tp"], [Replicate()])
    wire = Wire()
    world.add_observer(wire)
    linear(x).to_local().sum().backward()
    assert before.wire_bytes == wire.sent_bytes["all_gather", 4] + wire.sent_bytes["reduce_scatter", 4]


def test_offloading_from_a_gpu_leaves_the_host_what_rests(world: World) -> None:
    on_gpu = World(HashStore(), 0, 4, backend="fake", timeout_s=1.0, device=torch.device("cuda", 0))
    with entered_world(on_gpu), torch.device("meta"):
        mesh = disttrain.init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))
        model = Model()
        kept = estimate(model, mesh, blocks=model.blocks)
        moved = estimate(model, mesh, blocks=model.blocks, offload_policy=CPUOffloadPolicy())
    assert kept.host_bytes == moved.resting_bytes == 0
    assert moved.host_bytes == moved.parameters_bytes + moved.gradients_bytes + moved.optimizer_bytes
    assert kept.resting_bytes == moved.parameters_bytes + moved.optimizer_bytes
    assert kept.traffic == moved.traffic
    # A transport that writes into place leaves two blocks, the root, a block's gradients and those packed.
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    root = sum(parameter.nbytes for name, parameter in model.named_parameters() if "blocks" not in name)
    head = model.head.weight.nbytes
    assert kept.unsharded_peak_bytes == pytest.approx(root + head + 4 * block, rel=0.05)


def test_it_prints_a_table() -> None:
    model = Model()
    lines = str(estimate(model, blocks=model.blocks)).splitlines()
    assert lines[0] == "on 8, each rank; the peak is in the backward of blocks.0"
    assert [line.split()[0] for line in lines[2:7]] == ["parameters", "gradients", "optimizer", "buffers", "peak,"]
    assert ["reduce_scatter", "of", "8", "ranks", "5", "5", "1.80", "MiB"] in [line.split() for line in lines]


def test_mistakes_are_told() -> None:
    model = Model()
    with pytest.raises(ShardingError, match="a Linear of the blocks is no part of the model"):
        estimate(model, blocks=[nn.Linear(1, 1)])
    fully_shard(model.blocks[0])
    with pytest.raises(ShardingError, match="parts of the model are sharded, but not the model itself"):
        estimate(model)
    fully_shard(model)
    other = disttrain.init_device_mesh("cpu", (2, 4))
    with pytest.raises(ShardingError, match="sharded already, and mp_policy, blocks, mesh would say"):
        estimate(model, other, blocks=[model.blocks[0]], mp_policy=BF16)
    assert estimate(copy.deepcopy(model)) == estimate(model)
