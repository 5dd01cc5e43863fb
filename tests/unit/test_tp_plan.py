"""Plans that plan_for proposes: they keep the function, and what they say a step sends is what it sends."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.dtensor import CommDebugMode, Replicate, Shard
from disttrain.errors import ShardingError
from disttrain.testing import run_threads
from disttrain.tp import ColwiseParallel, ParallelPlan, RowwiseParallel, parallelize_module, plan_for
from tests.cases.tensor_parallel import Attention, Block, Decoder, same_as_alone


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_proposed_plan_keeps_the_function(num_ranks: int, sequence: bool, tied: bool) -> None:
    def make() -> nn.Module:
        return Decoder(tied=tied)

    plan = lambda: plan_for(make(), sequence_parallel=sequence)  # noqa: E731
    same_as_alone(make, plan, torch.randint(0, 16, (2, 8)), num_ranks)


def test_a_plan_names_each_kind_of_module_once() -> None:
    plan = plan_for(Decoder(num_blocks=3), loss_parallel=True)
    assert list(plan) == [
        "embedding",
        "blocks.*.attention_norm",
        "blocks.*.attention",
        "blocks.*.attention.query",
        "blocks.*.attention.key",
        "blocks.*.attention.value",
        "blocks.*.attention.out",
        "blocks.*.mlp_norm",
        "blocks.*.mlp",
        "blocks.*.mlp.gate",
        "blocks.*.mlp.up",
        "blocks.*.mlp.down",
        "norm",
        "head",
    ]
    key = plan["blocks.*.attention.key"]
    assert isinstance(key, ColwiseParallel)
    assert key.head_dim == 2
    assert isinstance(plan["embedding"], RowwiseParallel)
    assert plan["head"].output_layouts is None  # type: ignore[attr-defined]


def test_a_plan_prints_as_a_table_and_is_edited_as_a_dict() -> None:
    plan = plan_for(Decoder())
    lines = str(plan).splitlines()
    assert lines[0].split() == ["module", "count", "cut"]
    assert "blocks.*.mlp.down             2  rows, output Shard(1)" in lines
    sent = plan.wire_bytes(2, 1024)
    del plan["embedding"]
    plan["head"] = ColwiseParallel(input_layouts=Shard(1))
    assert plan.wire_bytes(2, 1024) < sent
    table = plan.table(2, 1024).splitlines()
    assert not any(line.startswith("embedding") for line in table)
    # What somebody has written by hand is shown, and not counted.
    assert next(line for line in table if line.startswith("head")).endswith("?            ?")
    assert table[-1].startswith("a rank of 2 sends")


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_step_sends_what_the_plan_says(num_ranks: int, sequence: bool) -> None:
    tokens = torch.randint(0, 16, (1, 8))

    def on_rank() -> None:
        mesh = disttrain.init_device_mesh("cpu", (num_ranks,))
        model = Decoder()
        plan = plan_for(model, sequence_parallel=sequence)
        said = plan.wire_bytes(num_ranks, tokens.numel(), torch.float32)
        parallelize_module(model, mesh, plan)
        with CommDebugMode() as comm:
            model(tokens).sum().backward()
        sent = comm.get_comm_bytes()
        share = (num_ranks - 1) / num_ranks
        held = (
            [module for module in model.modules() if isinstance(module, nn.RMSNorm | nn.LayerNorm)] if sequence else []
        )
        of_all = [parameter for module in held for parameter in module.parameters()]
        if num_ranks > 2:  # than heads of keys and values
            of_all += [layer.weight for block in model.blocks for layer in (block.attention.key, block.attention.value)]
        reduced = sent.get("all_reduce", 0) - sum(parameter.nbytes for parameter in of_all)
        # A gather is given a part, the others the whole.
        found = (num_ranks - 1) * sent.get("all_gather_into_tensor", 0)
        found += share * (sent.get("reduce_scatter_tensor", 0) + 2 * reduced)
        assert found == said

    run_threads(num_ranks, on_rank)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen3"])
def test_models_of_transformers_are_known(name: str) -> None:
    import transformers

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "hidden_size": 32}
    if name == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel
        fused = "transformer.h.*.attn.c_attn"
    else:
        more = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
        config = getattr(transformers, f"{name}Config")(**sizes, **more, bos_token_id=0, eos_token_id=0)
        model = getattr(transformers, f"{name}ForCausalLM")
        fused = None
    with torch.device("meta"):
        plan = plan_for(model(config))
    if fused is not None:
        style = plan[fused]
        assert isinstance(style, ColwiseParallel)
        assert (style.num_blocks, style.head_dim) == (3, 8)
    else:
        assert plan["model.layers.*.self_attn.k_proj"].head_dim == 8  # type: ignore[attr-defined]
        assert ("model.layers.*.self_attn.q_norm" in plan) == (name == "Qwen3")
    # They take the sequence's length from activations, which are left whole.
    rows = [style for style in plan.values() if isinstance(style, RowwiseParallel)]
    assert all(style.output_layouts == Replicate() for style in rows)


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(ShardingError, match="widen the hidden size and bring it back"):
        plan_for(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))

    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            for name in ("query", "key", "value", "out"):
                self.add_module(name, nn.Linear(8, 8))

    with pytest.raises(ShardingError, match="head_dim"):
        plan_for(nn.Sequential(Silent()))
    assert isinstance(plan_for(nn.Sequential(Silent()), head_dim=2), ParallelPlan)


@pytest.mark.parametrize(
    "sizes",
    [
        {"q": 8, "k": 4, "v": 4, "o": 8, "up": 32},
        {"q": 8, "k": 8, "v": 8, "o": 8, "gate": 24, "up": 24},
        {"qkv": 24, "o": 8, "up": 32},
        {"qkv": 24, "o": 8, "gate": 24, "up": 24},
    ],
)
def test_attention_and_mlp_in_one_module_are_not_taken_for_one_of_them(sizes: dict[str, int]) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            for name, width in sizes.items():
                self.add_module(name, nn.Linear(8, width))
            self.down = nn.Linear(sizes["up"], 8)

    with pytest.raises(ShardingError, match=r"Flat holds .*, down, which are those of an attention and an MLP in one"):
        plan_for(nn.Sequential(Flat()), head_dim=4)


class HeadNorm(nn.RMSNorm):
    """Over the dims of a head, with weights of each head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:]) * self.weight


class OfItsHeads(Attention):
    """With numbers of each head, of heads of keys and values, of each head's dims, and of all heads alike."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, num_heads=4, num_kv_heads=2)
        self.scale = nn.Parameter(torch.randn(4))
        self.key_scale = nn.Parameter(torch.randn(2, 1))
        self.value_shift = nn.Parameter(torch.randn(2, self.head_dim))
        self.norm = HeadNorm((4, self.head_dim))
        self.register_buffer("slopes", torch.rand(4, 1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.query, self.key, self.value))
        q, k, v = self.norm(q) * self.scale[:, None], k * self.key_scale, v + self.value_shift
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        distance = torch.arange(x.shape[1], dtype=x.dtype)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=self.slopes * distance)
        return self.out(y.transpose(1, 2).flatten(2))


class BlockOfHeads(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.attention = OfItsHeads(dim)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_what_an_attention_holds_for_its_heads_is_cut_with_them(num_ranks: int, sequence: bool) -> None:
    def make() -> nn.Module:
        return Decoder(block=BlockOfHeads)

    plan = lambda: plan_for(make(), sequence_parallel=sequence)  # noqa: E731
    same_as_alone(make, plan, torch.randint(0, 16, (2, 8)), num_ranks)


@pytest.mark.parametrize(
    ("name", "part", "problem"),
    [
        ("gain", nn.Parameter(torch.ones(())), "does not say how it lies over 4 heads"),
        ("gain", nn.Parameter(torch.ones(8)), "does not say how it lies over 4 heads"),
        ("q_norm", nn.RMSNorm(8), "a norm over all heads at once"),
        ("slopes", nn.Buffer(torch.ones(4)), "which is saved"),
    ],
)
def test_what_does_not_say_how_it_lies_over_heads_is_refused(name: str, part: nn.Module, problem: str) -> None:
    model = Decoder()
    setattr(model.blocks[0].attention, name, part)
    with pytest.raises(ShardingError, match=problem):
        plan_for(model)
