"""Models that were not written for us, transformers' made small, train cut by heads and columns as they do whole."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Placement, Replicate, Shard, StridedShard
from disttrain.fsdp2 import fully_shard
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import (
    ColwiseParallel,
    DivideAttributes,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    plan_for,
)
from tests.cases.tensor_parallel import check_gradients

VOCAB, HEAD_DIM = 37, 2
NUM_STEPS = 2


def make_model(name: str) -> nn.Module:
    """The model, equal on all ranks."""
    # Nothing is asked of a hub, and here nothing could be.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf  # here, since it takes seconds and few tests need it

    torch.manual_seed(0)
    if name == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = hf.GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=4 * HEAD_DIM, n_layer=2, n_head=4, **dropout)
        return hf.GPT2LMHeadModel(config).double()
    if name == "gpt_oss":
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
        config = hf.GptOssConfig(
            vocab_size=VOCAB, hidden_size=12, head_dim=4, intermediate_size=6, num_local_experts=3, **sizes
        )
        model = hf.GptOssForCausalLM(config).double()
        model.set_experts_implementation("eager")  # the other way knows no fp64
        return model
    if name == "t5":
        config = hf.T5Config(
            vocab_size=VOCAB, d_model=12, d_kv=4, d_ff=18, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )  # fmt: skip
        return hf.T5ForConditionalGeneration(config).double()
    num_kv_heads = 1 if name == "llama of one kv head" else 2
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=4 * HEAD_DIM, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=num_kv_heads, intermediate_size=18, max_position_embeddings=16,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).double()


def cut_model(model: nn.Module, name: str, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    plan = gpt2_plan(sequence=sequence) if name == "gpt2" else llama_plan(sequence=sequence)
    parallelize_module(model, mesh, plan)
    if name == "llama of one kv head":
        # All ranks have it, and it serves fewer query heads on each.
        parallelize_module(model, mesh, {"model.layers.*.self_attn": DivideAttributes("num_key_value_groups")})
    return model


def llama_plan(*, sequence: bool) -> dict[str, ParallelStyle]:
    """Activations between layers whole, or cut along the sequence. Masks and rotations are made for all of it before
    the first block, so only there is it cut."""
    cut = Shard(1) if sequence else None
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(),
        "lm_head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
    }
    layer = "model.layers.*"
    for projection in ("q_proj", "k_proj", "v_proj"):
        plan[f"{layer}.self_attn.{projection}"] = ColwiseParallel(head_dim=HEAD_DIM)
    for projection in ("gate_proj", "up_proj"):
        plan[f"{layer}.mlp.{projection}"] = ColwiseParallel()
    plan[f"{layer}.self_attn.o_proj"] = RowwiseParallel(output_layouts=cut)
    plan[f"{layer}.mlp.down_proj"] = RowwiseParallel(output_layouts=cut)
    if sequence:
        plan["model.layers.0"] = cut_along_the_sequence(1)
        plan["model.norm"] = SequenceParallel()
        plan[f"{layer}.input_layernorm"] = plan[f"{layer}.post_attention_layernorm"] = SequenceParallel()
        plan[f"{layer}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return plan


def gpt2_plan(*, sequence: bool) -> dict[str, ParallelStyle]:
    cut = Shard(1) if sequence else None
    block = "transformer.h.*"
    plan: dict[str, ParallelStyle] = {
        "transformer.wte": RowwiseParallel(),
        "lm_head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
        f"{block}.attn.c_attn": ColwiseParallel(num_blocks=3, head_dim=HEAD_DIM, input_layouts=cut),
        f"{block}.attn.c_proj": RowwiseParallel(output_layouts=cut),
        f"{block}.attn": DivideAttributes("split_size"),
        f"{block}.mlp.c_fc": ColwiseParallel(input_layouts=cut),
        f"{block}.mlp.c_proj": RowwiseParallel(output_layouts=cut),
    }
    if sequence:
        plan["transformer.h.0"] = cut_along_the_sequence(4)
        plan[f"{block}.ln_[12]"] = plan["transformer.ln_f"] = SequenceParallel()
    return plan


def cut_along_the_sequence(num_inputs: int) -> ParallelStyle:
    """For a block that is called with so many positional inputs, the first being the activations."""
    rest = [None] * (num_inputs - 1)
    return PrepareModuleInput(
        input_layouts=[Replicate(), *rest], desired_input_layouts=[Shard(1), *rest], use_local_output=True
    )


def batch(step: int, num_rows: int = 4) -> torch.Tensor:
    return torch.randint(0, VOCAB, (num_rows, 8), generator=torch.Generator().manual_seed(step))


def assert_trains_alike(model: nn.Module, reference: nn.Module, own_rows: slice) -> None:
    """Logits, losses, gradients, and parameters in the end, are those of one process."""
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-4) for one in (model, reference)]
    for step in range(NUM_STEPS):
        tokens = batch(step)
        own = tokens[own_rows]
        found, expected = model(input_ids=own, labels=own), reference(input_ids=tokens, labels=tokens)
        torch.testing.assert_close(found.logits, expected.logits[own_rows])
        loss = found.loss.detach().clone()
        disttrain.all_reduce(loss, disttrain.ReduceOp.AVG)
        torch.testing.assert_close(loss, expected.loss.detach())
        found.loss.backward()
        expected.loss.backward()
        check_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    torch.testing.assert_close(state, dict(reference.state_dict()))


@pytest.mark.parametrize("name", ["llama", "llama of one kv head", "gpt2"])
@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_it_trains_as_in_one_process(name: str, sequence: bool) -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = cut_model(make_model(name), name, mesh, sequence=sequence)
    assert_trains_alike(model, make_model(name), slice(None))


@pytest.mark.parametrize("name", ["llama", "llama of one kv head", "gpt2", "gpt_oss", "t5"])
@on_ranks(2)
def test_the_proposed_plan_trains_as_one_process(name: str) -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = make_model(name)
    assert_trains_alike(parallelize_module(model, mesh, plan_for(model)), make_model(name), slice(None))


@pytest.mark.parametrize(("name", "sequence"), [("llama", True), ("gpt2", False), ("gpt2", True)])
def test_it_trains_on_two_axes_as_in_one_process(name: str, sequence: bool) -> None:
    """On threads, in half the time: each axis has its tests on processes."""
    models, references = ([make_model(name) for _ in range(4)] for _ in range(2))
    run_threads(4, check_two_axes, models, references, name, sequence)


def check_two_axes(models: list[nn.Module], references: list[nn.Module], name: str, sequence: bool) -> None:
    rank = disttrain.get_rank()
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = cut_model(models[rank], name, mesh["tp"], sequence=sequence)
    blocks = model.transformer.h if name == "gpt2" else model.model.layers
    for block in blocks:
        fully_shard(block, mesh=mesh["dp"], shard_placement_fn=not_within_blocks)
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=not_within_blocks)
    place = mesh["dp"].get_local_rank()
    assert_trains_alike(model, references[rank], slice(2 * place, 2 * place + 2))


def not_within_blocks(parameter: nn.Parameter) -> Placement | None:
    """Dim 0, but where that is cut into uneven pieces, or a rank's part of it is pieces of several blocks."""
    if not isinstance(parameter, DTensor) or parameter.placements[0].cut_dim != 0:
        return None
    is_strided = isinstance(parameter.placements[0], StridedShard)
    return Shard(1) if is_strided or parameter.shape[0] % 2 else None
