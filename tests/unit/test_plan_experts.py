"""Plans of mixtures of experts: sizes by name, what ranks hold, what they exchange, and how long that takes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import disttrain
from disttrain.errors import SettingError
from disttrain.experts import Experts, MixtureOfExperts, Router, RouterRule, shard_experts
from disttrain.fsdp2 import MixedPrecisionPolicy, estimate, fully_shard
from disttrain.fsdp2.state import state_of
from disttrain.plan import (
    HARDWARE,
    Choice,
    ExpertAssumptions,
    ExpertSizes,
    Job,
    LatentAttention,
    LlamaSizes,
    MeshSizes,
    find_plans,
    memory_of,
    plan_of,
    read_sizes,
    traffic_of,
)
from disttrain.plan.cli import main
from disttrain.plan.job import meshes, why_not
from disttrain.plan.model.parts import elements_of, stages_of
from disttrain.plan.sharding.step import step_of
from disttrain.plan.sharding.transfers import ModelSharding
from disttrain.plan.time.exchange import exchange_of
from disttrain.plan.time.products import grouped_product_s, product_s
from disttrain.process_group import World
from tests.cases.planned_models import Attention, GatedMlp, Model, world_of_absent_ranks

NUM_RANKS = 8
EXPERTS = ExpertSizes(num_experts=8, top_k=2, ffn_size=96, shared_size=64)
SIZES = LlamaSizes(128, 6, 8, 4, 352, 1000, experts=EXPERTS)
JOB = Job(SIZES, NUM_RANKS, HARDWARE["h200"], seq_size=64, num_sequences=32)
MIXTRAL = read_sizes("mixtral-8x7b")


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_active"),
    [
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46_702_792_704, 12.7),
        ("Mixtral-8x22B-v0.1", 140.6, 39.0),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30.53, 3.0),
        ("qwen3-235b-a22b", 235.09, 21.6),
        ("deepseek-v2-lite", 15.7, 2.5),
        # transformers counts the bias for balance as a buffer: 256 for each of 58 blocks less.
        ("deepseek-ai/DeepSeek-V3-0324", 671_026_404_352 + 58 * 256, 36.6),
        # The model card's table: all parameters, and the active ones with the head but not the embedding.
        ("gpt-oss-20b", 20.91, 3.61),
        ("openai/gpt-oss-120b", 116.83, 5.13),
    ],
)
def test_numbers_of_parameters(name: str, num_parameters: float, num_active: float) -> None:
    sizes = read_sizes(name)
    if isinstance(num_parameters, int):
        assert sizes.num_parameters == num_parameters
    else:
        assert sizes.num_parameters / 1e9 == pytest.approx(num_parameters, abs=0.06)
    assert sizes.num_active / 1e9 == pytest.approx(num_active, abs=0.06)


CONFIGS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Of a config.json as it writes one, and of the module that it makes of that."""
    transformers = pytest.importorskip("transformers")
    common = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if kind == "deepseek_v3" else 2,
        "num_experts_per_tok": 2,
        "vocab_size": 64,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    config = transformers.AutoConfig.for_model(kind, **common, **CONFIGS[kind])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    biases = [each for name, each in model.named_buffers() if "bias" in name]
    truth = sum(each.numel() for each in [*model.parameters(), *biases])
    sizes = read_sizes(str(tmp_path))
    assert sizes.num_parameters == truth
    assert sizes.experts is not None
    assert (sizes.experts.num_experts, sizes.experts.top_k) == (4, 2)


def test_sizes_are_written_out_and_read_again(tmp_path: Path) -> None:
    assert read_sizes(SIZES.spelled, 1000) == SIZES
    with pytest.raises(SettingError, match="does not say how many of 8 experts"):
        read_sizes("dim=64,num_layers=2,num_heads=4,hidden_size=96,num_experts=8", 100)
    in_turn = {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 100, **in_turn}))
    with pytest.raises(SettingError, match="with and without experts in turn"):
        read_sizes(str(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"top_k": 9}, "top_k=9 of 8 experts"),
        ({"num_groups": 3}, "8 experts in 3 groups"),
        ({"shared_size": -1}, "shared_size is -1"),
    ],
)
def test_experts_that_cannot_be(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        replace(EXPERTS, **wrong)


@given(
    num_experts=st.sampled_from([4, 6, 8]),
    shared_size=st.sampled_from([0, 64]),
    num_dense=st.integers(0, 3),
    num_stages=st.integers(1, 6),
    tp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2]),
    is_latent=st.booleans(),
)
def test_parts_sum_to_the_whole(
    num_experts: int, shared_size: int, num_dense: int, num_stages: int, tp: int, ep: int, is_latent: bool
) -> None:
    experts = replace(EXPERTS, num_experts=num_experts, shared_size=shared_size, num_dense=num_dense)
    latent = LatentAttention(16, 12, 8, 4, 8) if is_latent else None
    sizes = replace(SIZES, experts=experts, latent=latent, num_kv_heads=8, extra_elements=10)
    stages = stages_of(sizes, num_stages)
    assert sum(stage.num_blocks for stage in stages) == sizes.num_layers
    assert sum(stage.num_dense for stage in stages) == num_dense
    if tp == 1:
        elements = elements_of(sizes, tp, ep)
        held = sum(elements.of(stage, is_tied=False) + ep * elements.experts_of(stage) for stage in stages)
        assert held == sizes.num_parameters
    cut = elements_of(sizes, tp, ep)
    assert cut.experts * tp * ep == num_experts * experts.expert_elements(sizes.dim)


class Block(nn.Module):
    """A decoder's, with experts."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        experts = sizes.experts
        assert experts is not None
        self.norms = nn.ModuleList([nn.RMSNorm(sizes.dim), nn.RMSNorm(sizes.dim)])
        self.attention = Attention(sizes)
        self.experts = MixtureOfExperts(
            Router(sizes.dim, RouterRule(experts.num_experts, experts.top_k)),
            Experts(experts.num_experts, sizes.dim, experts.ffn_size),
            GatedMlp(sizes.dim, experts.shared_size),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.fixture
def world() -> Iterator[World]:
    """Of ranks that are not there."""
    yield from world_of_absent_ranks(NUM_RANKS)


@pytest.mark.parametrize("reduces_each", [False, True])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_rank_holds_what_fully_shard_says(world: World, dp: int, reduces_each: bool) -> None:
    """Dense parameters over dp and ep, experts over dp: parameters, state, the peak, and what goes along each axis."""
    ep = NUM_RANKS // dp
    mesh = disttrain.init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    shards = mesh["dp", "ep"]._flatten("shards")
    with torch.device("meta"):
        model = Model(SIZES, Block)
    shard_experts(model, mesh["ep"], src_data_rank=None)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=shards, mp_policy=policy)
    fully_shard(model, mesh=shards, mp_policy=policy)
    for module in (*model.blocks, model):
        # As on GPUs: over Gloo all is flat by itself.
        state_of(module).device = torch.device("cuda")  # type: ignore[union-attr]
    truth = estimate(model, num_microbatches=2, reduces_each=reduces_each, optimizer=8)
    choice = Choice(MeshSizes(dp=dp, ep=ep), 1, 2, reduces_each=reduces_each)
    memory = memory_of(JOB, choice)
    assert memory.parameters == pytest.approx(truth.parameters_bytes, rel=2e-3)
    assert memory.optimizer == pytest.approx(truth.optimizer_bytes, rel=2e-3)
    stretches = step_of(ModelSharding.of(JOB, choice), choice, stages_of(SIZES, 1)).stretches
    assert max(stretch.num_bytes for stretch in stretches) == pytest.approx(truth.peak.num_bytes, rel=2e-3)
    by_axis = {one.axis: one for one in traffic_of(JOB, choice)}
    for axis, num_ranks in (("dp,ep", NUM_RANKS), ("dp", dp)):
        sent = sum(one.sent_bytes for one in truth.traffic if one.num_ranks == num_ranks)
        assert (by_axis[axis].sent_bytes if axis in by_axis else 0) == pytest.approx(sent, rel=2e-3)


def test_more_ranks_of_experts_hold_less_and_send_more() -> None:
    job = Job(MIXTRAL, 64, HARDWARE["h100"], seq_size=4096, num_sequences=256)
    plans = [plan_of(job, Choice(MeshSizes(pp=4, dp=16 // ep, ep=ep), 1, 16, "1F1B")) for ep in (1, 2, 8)]
    unsharded = [plan.memory.unsharded for plan in plans]
    assert unsharded == sorted(unsharded, reverse=True)
    assert unsharded[0] > 3 * unsharded[2]
    assert [plan.memory.exchange > 0 for plan in plans] == [False, True, True]
    assert plans[0].times.exchange == 0 < plans[1].times.exchange < plans[2].times.exchange
    for plan in plans:
        assert plan.times.step_s == pytest.approx(sum(plan.times.by_part.values()))
        assert plan.memory.total_bytes == sum(plan.memory.by_part.values())


def test_bytes_of_the_exchange() -> None:
    """Of 4096 tokens of 4096 elements in bfloat16, each to 2 of 8 experts, on 8 ranks of which 4 are on a host."""
    job = Job(MIXTRAL, 8, HARDWARE["h100"], node_size=4, seq_size=4096, num_sequences=8)
    choice = Choice(MeshSizes(ep=8), 1, 1)
    rows = 4096 * 4096 * 2
    by_choice = exchange_of(job, choice, 2)
    assert by_choice is not None
    assert by_choice.within_bytes == rows * 2 * 3 / 8
    assert by_choice.between_bytes == rows * 2 * 4 / 8
    per_host = replace(job, assumed=ExpertAssumptions(once_per_host=True))
    by_host = exchange_of(per_host, choice, 2)
    assert by_host is not None
    # Two of eight experts miss one host of two with probability 4/8 * 3/7.
    assert by_host.between_bytes == pytest.approx(rows * 2 * (1 - 3 / 14) / 2)
    (along_ep,) = (one for one in traffic_of(job, choice) if one.axis == "ep")
    assert along_ep.num_calls == 4 * 32
    assert along_ep.sent_bytes == pytest.approx(along_ep.num_calls * by_choice.sent_bytes)
    assert along_ep.between_bytes == pytest.approx(along_ep.num_calls * by_choice.between_bytes)


def test_a_token_of_limited_groups_goes_to_few_hosts() -> None:
    deepseek = read_sizes("deepseek-v3")
    assert deepseek.experts is not None
    assert deepseek.experts.hosts_of_token(8) == 4
    anywhere = replace(deepseek.experts, num_groups=1, most_groups=1)
    assert 5 < anywhere.hosts_of_token(8) < 5.5
    assert anywhere.hosts_of_token(1) == 1


def test_assumptions_change_what_they_say() -> None:
    job = Job(MIXTRAL, 64, HARDWARE["h100"], seq_size=4096, num_sequences=256)
    choice = Choice(MeshSizes(pp=4, ep=16), 1, 16, "1F1B")

    def plan(**changes: float) -> tuple[float, float, float]:
        found = plan_of(replace(job, assumed=ExpertAssumptions(**changes)), choice)  # type: ignore[arg-type]
        return found.times.exchange, found.times.compute, found.memory.activations

    even, uneven = plan(imbalance=1.0), plan(imbalance=1.5)
    assert all(more > less for more, less in zip(uneven, even, strict=True))
    assert plan(imbalance=1.0, hidden=1.0)[0] < 0.2 * even[0]
    assert plan(imbalance=1.0, exchange_bytes=1)[0] < 0.8 * even[0]


@pytest.mark.parametrize(
    ("num_experts", "rows", "columns", "inner", "measured"),
    [
        (64, 2048, 2816, 2048, 0.86),
        (64, 2048, 4096, 4096, 0.90),
        (64, 256, 2816, 2048, 0.51),
        (128, 1024, 1536, 2048, 0.80),
        (8, 4096, 28_672, 4096, 0.96),
    ],
)
def test_products_of_experts_are_as_slow_as_measured(
    num_experts: int, rows: int, columns: int, inner: int, measured: float
) -> None:
    """Mean over forward, inputs and weights of benchmarks/results/experts_gpu.json, to one product of as many rows."""
    hardware = HARDWARE["h100"]
    grouped = grouped_product_s(hardware, hardware.matmul_flops, num_experts, (rows, columns, inner), rows, 2)
    alone = product_s(hardware, hardware.matmul_flops, num_experts * rows, columns, inner)
    assert alone / grouped == pytest.approx(measured, abs=0.05)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (MeshSizes(ep=16), "leaves ranks without any of 8 experts"),
        (MeshSizes(tp=64), "does not divide heads"),
        (MeshSizes(dp=4, ep=8), "do not divide among 32 ranks"),
    ],
)
def test_rules(mesh: MeshSizes, words: str) -> None:
    assert words in str(why_not(replace(JOB, num_sequences=16, seq_size=64), mesh))


def test_rules_of_what_has_no_experts_or_narrow_ones() -> None:
    assert "without experts" in str(why_not(JOB.without_experts, MeshSizes(ep=2)))
    narrow = replace(JOB, sizes=replace(SIZES, experts=replace(EXPERTS, ffn_size=98)))
    assert "experts (98)" in str(why_not(narrow, MeshSizes(tp=4)))
    # Uneven experts can be run: the rank that has most takes longest.
    assert why_not(replace(JOB, num_sequences=33), MeshSizes(ep=3)) is None


def test_the_search_looks_along_ep() -> None:
    sizes = {mesh.ep for mesh in meshes(JOB)}
    assert sizes == {1, 2, 4, 8}
    assert {mesh.ep for mesh in meshes(JOB.without_experts)} == {1}
    assert all(mesh.num_gpus == NUM_RANKS for mesh in meshes(JOB))
    job = Job(read_sizes("qwen3-30b-a3b"), 64, HARDWARE["h100"], seq_size=4096, num_sequences=64)
    plans = find_plans(job, num_plans=4).plans
    assert len({plan.choice.mesh.ep for plan in plans}) > 1
    assert all(plan.fits(job) for plan in plans)


def test_it_prints_active_parameters_and_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "mixtral-8x7b", "--gpus", "32", "--seq", "4096", "--batch-tokens", "1048576", "--top", "1"]
    assert main([*arguments, "--mesh", "pp=4,ep=8", "--schedule", "1F1B", "--imbalance", "1.4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("46.7G parameters, 12.7G of them active, on 32 x NVIDIA H100 SXM")
    assert "8 experts, 2 of them for a token. Assumed: the rank with most rows has 1.4 times the mean" in out
    assert "sent along ep" in out
    assert "--mesh pp=4,ep=8" in out


def test_deepseek_on_its_own_mesh() -> None:
    """Each rank of ep has four experts of each block, and the mesh has the GPUs that it ran on."""
    deepseek = read_sizes("deepseek-v3")
    mesh = MeshSizes(pp=16, dp=2, ep=64)
    assert mesh.num_gpus == 2048
    assert deepseek.experts is not None
    assert deepseek.experts.of_rank(64) == 4
    elements = elements_of(deepseek, 1, 64)
    assert elements.experts == 4 * 3 * 7168 * 2048
    assert math.isclose(deepseek.flops(1, 4096), 250e9, rel_tol=0.01)
