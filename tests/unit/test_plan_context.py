"""The planner's axis cp: a rank has the tokens of its part, sends what the plan of parts sends, and is chosen for long
sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disttrain.kernels import Causal
from disttrain.kernels.attention.context.parts import mirrored
from disttrain.kernels.attention.context.planning.heads_cut import num_head_groups
from disttrain.kernels.attention.context.planning.steps import RING, most_sent
from disttrain.kernels.attention.context.planning.tiles import tiles_of
from disttrain.plan.job import Choice, Job, MeshSizes, meshes, why_not
from disttrain.plan.model.activations import kept_of
from disttrain.plan.model.memory import memory_of
from disttrain.plan.model.named import PRESETS
from disttrain.plan.search import find_plans, plan_of
from disttrain.plan.time.context import keys_of
from disttrain.plan.time.hardware import HARDWARE
from disttrain.plan.time.traffic import traffic_of

JOB = Job(PRESETS["8b"], 64, HARDWARE["h100"], seq_size=131_072, num_sequences=16)
ALONG_CP = Choice(MeshSizes(dp=4, cp=8, tp=2), 1, 4)


def test_a_rank_keeps_what_it_would_of_a_shorter_sequence() -> None:
    for recomputes in (False, True):
        choice = replace(ALONG_CP, recomputes=recomputes)
        shorter = replace(JOB, seq_size=JOB.seq_size // 8)
        without = replace(choice, mesh=MeshSizes(dp=32, tp=2))
        assert kept_of(JOB, choice) == kept_of(shorter, without)
        assert replace(memory_of(JOB, choice), messages=0) == memory_of(shorter, without)


def test_slots_hold_what_a_step_of_the_ring_sends() -> None:
    """Two for keys, two for terms, of a group of heads."""
    for num_sequences, tp in ((1, 1), (4, 2), (4, 8)):
        choice = Choice(MeshSizes(cp=8, tp=tp), num_sequences, 1)
        num_heads, num_kv_heads, positions = 32 // tp, 8 // tp, mirrored(JOB.seq_size, 8)
        num_elements = num_sequences * num_heads * 128 * max(positions.sizes)
        num_groups = num_head_groups(num_kv_heads, num_elements)
        most = max(most_sent(tiles_of(positions, Causal()), RING))
        slot = num_sequences * most * 2 * num_kv_heads // num_groups * 128 * 2
        assert memory_of(JOB, choice).messages == 4 * slot


def test_a_million_tokens_take_as_much_on_as_many_times_the_ranks() -> None:
    million = replace(JOB, seq_size=8 * JOB.seq_size, num_gpus=8 * JOB.num_gpus)
    longer = replace(ALONG_CP, mesh=replace(ALONG_CP.mesh, cp=64))
    few, many = memory_of(JOB, ALONG_CP), memory_of(million, longer)
    assert many.activations == few.activations
    assert many.loss == few.loss
    assert many.parameters <= few.parameters


def test_what_is_sent_is_what_the_tiles_need() -> None:
    num_ranks, width = 8, 2 * 8 // 2 * 128  # keys and values of 8 heads of 128 on two ranks of tp
    tiles = tiles_of(mirrored(JOB.seq_size, num_ranks), Causal())
    rows = [
        sum(tiles.num_needed(rank, source) for rank in range(num_ranks) if rank != source)
        for source in range(num_ranks)
    ]
    keys = keys_of(JOB, ALONG_CP)
    assert keys is not None
    assert keys.sent_bytes == pytest.approx(sum(rows) / num_ranks * width * 2)
    (along_cp,) = [traffic for traffic in traffic_of(JOB, ALONG_CP) if traffic.axis == "cp"]
    # Forward once, backward twice: keys once more, and their gradients.
    assert along_cp.sent_bytes == pytest.approx(4 * 32 * 3 * keys.sent_bytes)
    assert along_cp.num_calls == 4 * 32 * 3 * 7
    # Four positions along cp are on a node beside two of tp.
    assert along_cp.between_share == pytest.approx(4 / 7)


def test_parameters_are_sharded_over_dp_and_cp() -> None:
    mesh = ALONG_CP.mesh
    assert (mesh.num_shards, mesh.shards) == (32, "dp,cp")
    assert (mesh.num_batch_parts, str(mesh)) == (4, "dp=4,cp=8,tp=2")
    with_experts = MeshSizes(dp=2, ep=4, cp=8)
    assert (with_experts.num_shards, with_experts.num_expert_shards) == (64, 16)
    assert (with_experts.shards, with_experts.expert_shards) == ("dp,ep,cp", "dp,cp")


def test_long_sequences_are_cut_and_short_ones_are_not() -> None:
    assert {mesh.cp for mesh in meshes(replace(JOB, seq_size=8192))} == {1}
    assert {mesh.cp for mesh in meshes(JOB)} == {1, 2, 4, 8, 16}
    assert why_not(replace(JOB, seq_size=131_070), MeshSizes(dp=8, cp=8)) == "cp=8 does not divide sequences (131070)"
    assert "divide sequences (16385)" in str(why_not(replace(JOB, seq_size=131_080), MeshSizes(dp=4, cp=8, tp=2)))


def test_what_attention_does_not_hide_is_told() -> None:
    """Attention of short sequences is over before the keys are there; of long ones it is not."""
    shares = []
    for seq_size in (2048, 131_072):
        job = replace(JOB, seq_size=seq_size)
        times = plan_of(job, ALONG_CP).times
        shares.append(times.cp / times.compute)
    assert shares[0] > 3 * shares[1]
    assert plan_of(JOB, replace(ALONG_CP, mesh=MeshSizes(dp=32, tp=2), num_microbatches=1)).times.cp == 0.0


def test_its_choice_for_405b_at_131072_tokens_has_the_cp_of_those_who_trained_it() -> None:
    """Llama Team, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 4: 16,384 H100, tp 8, cp 16, pp 16, dp 8."""
    job = Job(PRESETS["405b"], 16_384, HARDWARE["h100"], seq_size=131_072, num_sequences=128)
    plans = find_plans(job, num_plans=2, schedules=("Interleaved1F1B",)).plans
    assert [plan.choice.mesh.cp for plan in plans] == [16, 16]
    assert {plan.choice.mesh.tp for plan in plans} == {8}
