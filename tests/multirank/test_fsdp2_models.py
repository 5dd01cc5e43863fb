"""Models that were not written for us, transformers' made small, train under fully_shard as they do in one process."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import FSDPModule, fully_shard
from disttrain.testing.pytest_plugin import on_ranks

NUM_STEPS = 4
NUM_ROWS, ROW_SIZE = 6, 9
VOCAB = 37
WIDTHS = {"vocab_size": VOCAB, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
LLAMA = {**WIDTHS, "intermediate_size": 20, "num_key_value_heads": 1, "max_position_embeddings": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_model(name: str) -> tuple[nn.Module, Iterable[nn.Module]]:
    """The model, equal on all ranks, and its blocks. Sizes divide neither by 2 nor by 3 throughout."""
    # Nothing is asked of a hub, and here nothing could be.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf  # here, since it takes seconds and few tests need it

    torch.manual_seed(0)
    if name == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=10, n_layer=3, n_head=2, **dropout)
        )
        return model, model.transformer.h
    if name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
        return model, model.model.layers
    if name == "mixtral":
        # Without the loss that balances experts: that of a batch is not the mean of its rows'.
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**LLAMA, num_local_experts=3, num_experts_per_tok=2))
        return model, model.model.layers
    if name == "bert":
        model = hf.BertForMaskedLM(
            hf.BertConfig(**WIDTHS, intermediate_size=20, max_position_embeddings=16, **NO_DROPOUT)
        )
        return model, model.bert.encoder.layer
    t5 = {"d_model": 10, "d_kv": 5, "d_ff": 14, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCAB, dropout_rate=0.0, **t5))
    return model, [*model.encoder.block, *model.decoder.block]


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step: each model's inputs, and what it is to say."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(3, VOCAB, (2, NUM_ROWS, ROW_SIZE), generator=generator)
    return {"input_ids": tokens, "labels": labels if name in ("bert", "t5") else tokens}


def own_rows(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    return {name: value.chunk(num_ranks)[rank] for name, value in whole.items()}


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    total = loss.detach().clone()
    disttrain.all_reduce(total, disttrain.ReduceOp.AVG)
    return total


def assert_trains_alike(name: str, *, checkpoints: dict[str, bool] | None = None) -> None:
    """Losses, norms of gradients and, in the end, parameters are those of one process."""
    reference, _ = make_model(name)
    model, blocks = make_model(name)
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)
    runs: list[nn.Module] = []
    for block in blocks:
        fully_shard(block)
        leaf = next(part for part in block.modules() if not any(part.children()))
        leaf.register_forward_hook(lambda part, *_: runs.append(part))
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    for one in (model, reference):
        one.train()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-4) for one in (model, reference)]
    losses = []
    for step in range(NUM_STEPS):
        whole = batch(name, step % 2)
        loss, expected = model(**own_rows(whole)).loss, reference(**whole).loss
        loss.backward()
        expected.backward()
        torch.testing.assert_close(mean_over_ranks(loss), expected.detach(), rtol=1e-5, atol=1e-5)
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 1.0) for one in (model, reference)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(expected.item())
    assert losses[-1] < losses[1]
    assert set(Counter(runs).values()) == {NUM_STEPS if checkpoints is None else 2 * NUM_STEPS}
    for (parameter_name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.full_tensor(), other, rtol=1e-4, atol=1e-5, msg=lambda text, of=parameter_name: f"{of}: {text}"
        )


@on_ranks(3)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "mixtral"])
def test_it_trains_as_in_one_process(name: str) -> None:
    assert_trains_alike(name)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_it_trains_as_in_one_process_with_activation_checkpointing(reentrant: bool) -> None:
    assert_trains_alike("llama", checkpoints={"use_reentrant": reentrant})


@on_ranks(2)
def test_its_state_dict_has_its_own_names_and_loads_into_another() -> None:
    model, blocks = make_model("t5")
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    plain, _ = make_model("t5")
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert list(whole) == list(plain.state_dict())
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(whole)
    assert all(torch.equal(one, two) for one, two in zip(other.parameters(), plain.parameters(), strict=True))
