"""What the planner counts: parts that sum to the whole, what the parts of disttrain count that run it, monotonic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import disttrain
from disttrain import tp
from disttrain.fsdp2 import MixedPrecisionPolicy, TransferCost, estimate, fully_shard
from disttrain.fsdp2.state import state_of
from disttrain.kernels.cross_entropy.plan import BLOCK_BYTES, plan_blocks
from disttrain.pipelining import Costs, make_schedule, peaks, simulate
from disttrain.plan import HARDWARE, PRESETS, Choice, Job, LlamaSizes, MeshSizes, memory_of, plan_of, traffic_of
from disttrain.plan.model.activations import kept_of
from disttrain.plan.model.memory import profiles
from disttrain.plan.model.parts import StageParts, elements_of, parts_of_ranks, stages_of
from disttrain.plan.sharding import step
from disttrain.plan.sharding.step import step_of
from disttrain.plan.sharding.transfers import ModelSharding
from disttrain.plan.time.times import costs_of, makespan_s
from disttrain.process_group import World
from tests.cases.planned_models import Attention, GatedMlp, Model, world_of_absent_ranks

NUM_RANKS = 8
SIZES = LlamaSizes(dim=128, num_layers=6, num_heads=8, num_kv_heads=4, ffn_size=352, vocab_size=1000)
JOB = Job(SIZES, NUM_RANKS, HARDWARE["h200"], seq_size=64, num_sequences=32)
BIG = Job(PRESETS["8b"], 64, HARDWARE["h100"], num_sequences=512)


class Block(nn.Module):
    """A decoder's."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.dim), nn.RMSNorm(sizes.dim)
        self.attention, self.mlp = Attention(sizes), GatedMlp(sizes.dim, sizes.ffn_size)


@pytest.fixture
def world() -> Iterator[World]:
    """Of ranks that are not there."""
    yield from world_of_absent_ranks(NUM_RANKS)


@pytest.mark.parametrize("reduces_each", [False, True])
def test_a_rank_holds_what_fully_shard_says(world: World, reduces_each: bool) -> None:
    """Parameters, gradients and optimizer state to a thousandth, which is padding; collectives' bytes likewise."""
    mesh = disttrain.init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "dp"))
    with torch.device("meta"):
        model = Model(SIZES, Block)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    truth = estimate(
        model, mesh, blocks=model.blocks, mp_policy=policy, num_microbatches=4, reduces_each=reduces_each, optimizer=8
    )
    choice = Choice(MeshSizes(replicate=2, dp=4), 1, 4, reduces_each=reduces_each)
    memory = memory_of(JOB, choice)
    assert memory.parameters == pytest.approx(truth.parameters_bytes, rel=1e-3)
    assert memory.optimizer == pytest.approx(truth.optimizer_bytes, rel=1e-3)
    by_axis = {one.axis: one for one in traffic_of(JOB, choice)}
    along_dp = [one for one in truth.traffic if one.num_ranks == 4]
    along_replicate = [one for one in truth.traffic if one.num_ranks == 2]
    assert by_axis["dp"].sent_bytes == pytest.approx(sum(one.sent_bytes for one in along_dp), rel=1e-3)
    assert by_axis["replicate"].sent_bytes == pytest.approx(sum(one.sent_bytes for one in along_replicate), rel=1e-3)


NETWORKS = {
    "fast": (2e-6, 5e10),
    "slow": (1e-3, 1e9),
    "far": (1e-2, 1e9),
}


@pytest.mark.parametrize("vocab_size", [1000, 100_000])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("network", [None, *NETWORKS])
def test_parameters_go_as_fully_shard_plans_it(
    world: World, network: str | None, is_tied: bool, vocab_size: int
) -> None:
    """Launches and collectives of a step, and the form of each group."""
    mesh = disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
    sizes = replace(SIZES, vocab_size=vocab_size, is_tied=is_tied)
    hardware, cost = HARDWARE["h200"], None
    if network is not None:
        latency_s, bytes_per_s = NETWORKS[network]
        hardware = replace(
            hardware, network_latency_s=latency_s, network_step_s=0.0, node_step_s=0.0, network_bytes_per_s=bytes_per_s
        )
        cost = TransferCost(latency_s, bytes_per_s * NUM_RANKS / (NUM_RANKS - 1))
    job = replace(JOB, sizes=sizes, hardware=hardware, node_size=NUM_RANKS if network is None else 1)
    with torch.device("meta"):
        model = Model(sizes, Block)
        if is_tied:
            model.head.weight = model.embedding.weight
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in (*model.blocks, model):
        # As on GPUs: over Gloo all is flat by itself.
        state_of(module).device = torch.device("cuda")
    said = estimate(model, network=cost, optimizer=8)
    (along_dp,) = traffic_of(job, Choice(MeshSizes(dp=NUM_RANKS), 4, 1))
    assert along_dp.num_calls == sum(one.num_calls for one in said.traffic)
    assert along_dp.num_collectives == sum(one.num_collectives for one in said.traffic)


@pytest.mark.parametrize("vocab_size", [200, 100_000])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("reduces_each", [False, True])
def test_what_is_unsharded_is_what_fully_shard_says(
    world: World, reduces_each: bool, is_tied: bool, vocab_size: int
) -> None:
    """At the peak, of all microbatches: but for the gaps between gathered parameters, to the byte."""
    mesh = disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
    sizes = replace(SIZES, num_layers=24, vocab_size=vocab_size, is_tied=is_tied)
    with torch.device("meta"):
        model = Model(sizes, Block)
        if is_tied:
            model.head.weight = model.embedding.weight
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        state_of(module).device = torch.device("cuda")
    truth = estimate(model, num_microbatches=4, reduces_each=reduces_each, optimizer=8)
    choice = Choice(MeshSizes(dp=NUM_RANKS), 1, 4, reduces_each=reduces_each)
    job = replace(JOB, sizes=sizes)
    stretches = step_of(ModelSharding.of(job, choice), choice, stages_of(sizes, 1)).stretches
    assert max(stretch.num_bytes for stretch in stretches) == pytest.approx(truth.peak.num_bytes, rel=2e-4)
    assert memory_of(job, choice).gradients <= truth.gradients_bytes


@settings(max_examples=15)
@given(
    num_blocks=st.integers(6, 12),
    dp=st.sampled_from([1, 2, 8]),
    num_microbatches=st.integers(0, 3),
    has_ends=st.booleans(),
    reduces_each=st.booleans(),
    is_tied=st.booleans(),
)
def test_few_blocks_tell_of_many(
    num_blocks: int, dp: int, num_microbatches: int, has_ends: bool, reduces_each: bool, is_tied: bool
) -> None:
    """What is read off a line is what going through all blocks counts."""
    choice = Choice(MeshSizes(dp=dp), 1, max(1, num_microbatches))
    sharding = ModelSharding.of(replace(BIG, sizes=replace(BIG.sizes, is_tied=is_tied)), choice)
    stage = StageParts(num_blocks, has_embedding=has_ends or num_microbatches > 0, has_head=has_ends)
    kind = sharding, stage, num_microbatches
    short, long = (run(*kind, reduces_each=reduces_each) for run in (step._step, step._rehearsed))
    assert (short.messages, short.last_messages) == (long.messages, long.last_messages)
    of_long = {(each.when, each.num_kept, each.num_bytes) for each in long.stretches}
    assert {(each.when, each.num_kept, each.num_bytes) for each in short.stretches} <= of_long
    fullest = [
        max(each.num_bytes + each.num_kept * kept for each in run.stretches)
        for run in (short, long)
        for kept in (0, 10**9)
    ]
    assert fullest[:2] == fullest[2:]


def test_tensor_parallel_sends_what_its_plan_says() -> None:
    with torch.device("meta"):
        model = Model(SIZES, Block)
    plan = tp.plan_for(model, loss_parallel=True, head_dim=SIZES.head_size)
    job = replace(JOB, num_gpus=4, num_sequences=3)
    (along_tp,) = traffic_of(job, Choice(MeshSizes(tp=4), 3, 1))
    assert along_tp.sent_bytes == pytest.approx(plan.wire_bytes(4, 3 * job.seq_size), rel=1e-3)


@given(
    num_layers=st.integers(1, 40),
    num_stages=st.integers(1, 12),
    tp_size=st.sampled_from([1, 2, 4, 8]),
    is_tied=st.booleans(),
)
def test_parts_sum_to_the_whole(num_layers: int, num_stages: int, tp_size: int, is_tied: bool) -> None:
    sizes = replace(SIZES, num_layers=num_layers, num_kv_heads=8, is_tied=is_tied)
    stages = stages_of(sizes, min(num_stages, num_layers))
    assert sum(stage.num_blocks for stage in stages) == num_layers
    assert [stage.has_embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.has_head for stage in stages] == [False] * (len(stages) - 1) + [True]
    elements = elements_of(sizes, tp_size)
    norms = 2 * sizes.dim * num_layers + sizes.dim
    held = sum(elements.of(stage, is_tied=is_tied and len(stages) == 1) for stage in stages)
    whole = tp_size * (held - norms) + norms
    # Both ends of a pipeline have a tied matrix.
    assert whole == sizes.num_parameters + sizes.vocab_elements * (is_tied and len(stages) > 1)


@given(
    dp=st.sampled_from([1, 2, 4, 8]),
    tp_size=st.sampled_from([1, 2, 4, 8]),
    microbatch_size=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from([None, "1F1B", "ZBVZeroBubble"]),
)
def test_more_ranks_and_recomputing_take_less_memory(
    dp: int, tp_size: int, microbatch_size: int, schedule: str | None
) -> None:
    mesh = MeshSizes(pp=2 if schedule else 1, dp=dp, tp=tp_size)
    choice = Choice(mesh, microbatch_size, 4, schedule)
    plan = plan_of(BIG, choice)
    assert sum(plan.memory.by_part.values()) == plan.memory.total_bytes
    assert min(plan.memory.by_part.values()) >= 0
    assert plan.times.step_s == pytest.approx(sum(plan.times.by_part.values()))
    again = plan_of(BIG, replace(choice, recomputes=True))
    assert again.memory.total_bytes < plan.memory.total_bytes
    assert again.times.step_s > plan.times.step_s
    assert again.times.recompute > plan.times.recompute == 0
    wider = plan_of(BIG, replace(choice, mesh=replace(mesh, dp=2 * dp)))
    assert wider.memory.total_bytes < plan.memory.total_bytes
    larger = plan_of(BIG, replace(choice, microbatch_size=2 * microbatch_size))
    assert larger.memory.total_bytes > plan.memory.total_bytes
    assert larger.times.step_s > plan.times.step_s


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "V-Half", "V-Min", "DualPipeV", "GPipe"])
def test_a_pipeline_keeps_what_its_schedule_keeps(name: str) -> None:
    schedule = make_schedule(name, 4, 16)
    blocks = tuple(range(1, schedule.num_stages + 1))
    costs = Costs(live_bytes=tuple(7.0 * num for num in blocks), pending_bytes=tuple(5.0 * num for num in blocks))
    truth = [peak.num_bytes for peak in peaks(schedule, costs)]
    found = [max(7 * live + 5 * pending for live, pending, _ in one) for one in profiles((name, 4, None), 16, blocks)]
    assert found == truth


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "V-Half"])
def test_a_schedule_gathers_and_reduces_once(name: str) -> None:
    """However many microbatches there are: all of a rank's parameters there, and all gradients back."""
    mesh = MeshSizes(pp=4, replicate=2, dp=8)
    few, many = (traffic_of(BIG, Choice(mesh, 1, num, name)) for num in (8, 16))
    by_axis = {one.axis: one for one in many}
    assert [one for one in few if one.axis != "pp"] == [one for one in many if one.axis != "pp"]
    stages = parts_of_ranks(BIG, Choice(mesh, 1, 16, name))
    most = max(sum(elements_of(BIG.sizes, 1).of(stage, is_tied=False) for stage in of_rank) for of_rank in stages)
    assert by_axis["dp"].sent_bytes == pytest.approx(most * (2 + 4) * 7 / 8, rel=1e-3)
    assert by_axis["replicate"].sent_bytes == pytest.approx(2 * most / 8 * 4 / 2, rel=1e-3)


def test_gpipe_keeps_all_microbatches() -> None:
    job = replace(BIG, num_sequences=64)
    few, many = (memory_of(job, Choice(MeshSizes(pp=4, dp=16), 1, num, "GPipe")) for num in (16, 64))
    kept = kept_of(job, Choice(MeshSizes(pp=4, dp=16), 1, 16, "GPipe"))
    most_blocks = max(stage.num_blocks for stage in stages_of(job.sizes, 4))
    assert many.activations - few.activations == 48 * most_blocks * kept.block


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "V-Half", "V-Min", "LoopedBFS"])
@pytest.mark.parametrize("num_microbatches", [3, 16, 41])
def test_many_microbatches_take_what_simulating_them_all_would_say(name: str, num_microbatches: int) -> None:
    job = replace(BIG, num_sequences=512)
    choice = Choice(MeshSizes(pp=4, dp=4, tp=4), 1, num_microbatches, name)
    try:
        schedule = make_schedule(name, 4, num_microbatches)
    except disttrain.errors.ScheduleError:
        pytest.skip(f"{name} is not made for {num_microbatches} microbatches")
    assert makespan_s(job, choice) == pytest.approx(simulate(schedule, costs_of(job, choice)).makespan_s, rel=1e-3)


def test_rings_that_leave_a_node() -> None:
    """Each rank of a node has its own network link; a ring uses those of all its ranks there."""
    mesh = MeshSizes(pp=2, replicate=2, dp=4, tp=4)
    assert [mesh.stride(axis) for axis in ("pp", "replicate", "dp", "tp")] == [32, 16, 4, 1]
    assert [mesh.num_on_node(axis, 8) for axis in ("pp", "replicate", "dp", "tp")] == [1, 1, 2, 4]
    job = replace(BIG, num_sequences=128)
    shares = {one.axis: one.between_share for one in traffic_of(job, Choice(mesh, 1, 16, "1F1B"))}
    assert shares == {"pp": 1.0, "replicate": 1.0, "dp": 0.5, "tp": 0.0}


def test_the_loss_without_logits_has_the_kernels_blocks() -> None:
    choice, vocab = Choice(MeshSizes(dp=64), 4, 2), BIG.sizes.vocab_size
    tokens = choice.microbatch_size * BIG.seq_size
    blocks = plan_blocks(tokens, vocab, 2, BLOCK_BYTES)
    sums = 4 * BIG.sizes.vocab_elements + 4 * tokens * BIG.sizes.dim
    assert kept_of(BIG, choice).loss == pytest.approx(sums + 2 * blocks.rows * vocab, rel=0.02)


def test_a_pipelines_loss_has_no_copies_of_its_logits() -> None:
    choice = Choice(MeshSizes(pp=4, dp=16), 1, 8, "1F1B")
    assert kept_of(BIG, choice).loss == 2 * 2 * BIG.seq_size * BIG.sizes.vocab_size
    assert kept_of(replace(BIG, has_lean_loss=False), choice).loss == 3 * kept_of(BIG, choice).loss


def test_the_loss_without_logits_takes_less() -> None:
    choice = Choice(MeshSizes(dp=64), 4, 2)
    assert kept_of(BIG, choice).loss < kept_of(replace(BIG, has_kernels=False), choice).loss / 4
