"""Batches that are cut over ranks: what each rank gets, and models that train on them as one process does."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.context_parallel import cut_batch, own_positions
from disttrain.dtensor import DTensor
from disttrain.errors import ArgumentError, DisttrainError, LayoutError, MeshError, RankMismatchError, ShapeError
from disttrain.fsdp2 import fully_shard
from disttrain.kernels import Causal, Documents, SlidingWindow, linear_cross_entropy, use_kernels
from disttrain.testing.pytest_plugin import on_ranks

VOCAB, NUM_ROWS = 37, 2


def axis() -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),), mesh_dim_names=("cp",))


def rows(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (NUM_ROWS, length), generator=torch.Generator().manual_seed(seed))


@on_ranks(1, 2, 3)
def test_parts_join_to_what_was_shifted_whole() -> None:
    mesh = axis()
    for length in (1, 2, 7, 12):
        tokens = rows(length)
        labels = tokens.masked_fill(tokens % 5 == 0, -100)
        ids = torch.arange(length) // 3
        batch = cut_batch(mesh, tokens, labels=labels, document_ids=ids)
        assert torch.equal(batch.unshard(batch.input_ids, 1), tokens)
        assert torch.equal(batch.unshard(batch.position_ids, 1), (torch.arange(length) % 3).expand_as(tokens))
        assert batch.document_ids is not None
        assert torch.equal(batch.unshard(batch.document_ids, 1), ids.expand_as(tokens))
        expected = F.pad(labels[:, 1:], (0, 1), value=-100)
        expected[:, 2::3] = -100
        assert torch.equal(batch.unshard(batch.targets, 1), expected)
        assert batch.num_targets == (expected != -100).sum()
        given = cut_batch(mesh, tokens, targets=tokens)
        assert torch.equal(given.targets, given.input_ids)
        assert given.document_ids is None
        with given.attention():
            assert torch.equal(own_positions(length), given.position_ids[0])
        assert torch.equal(own_positions(length), torch.arange(length))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB, bias=False)
        self.projections = nn.Linear(8, 24, bias=False)
        self.double()

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + position_ids.unsqueeze(-1) / 7
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.projections(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)


def expected_of(model: Model, tokens: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The loss of whole sequences, document by document."""
    losses = []
    for row in range(len(tokens)):
        own = torch.zeros_like(tokens[row]) if ids is None else ids[row]
        for document in own.unique():
            piece = tokens[row, own == document].unsqueeze(0)
            hidden = model(piece, torch.arange(piece.shape[1]).unsqueeze(0))
            losses.append(F.cross_entropy(model.head(hidden)[0, :-1], piece[0, 1:], reduction="none"))
    return torch.cat(losses).mean()


@on_ranks(2, 3)
@pytest.mark.parametrize("ways", ["plain", "documents", "documents and kernels"])
def test_losses_and_gradients_of_unequal_parts_are_those_of_one_process(ways: str) -> None:
    mesh, tokens = axis(), rows(11)
    # With documents that end elsewhere in each row.
    ids = torch.stack([torch.arange(11) // 4, torch.arange(11) // 7]) if ways != "plain" else None
    reference, model = Model(), Model()
    expected = expected_of(reference, tokens, ids)
    expected.backward()
    if "kernels" in ways:
        use_kernels(model, report=lambda _: None)
    fully_shard(model, mesh=mesh)
    # There are two heads, for as many ranks or none.
    batch = cut_batch(mesh, tokens, document_ids=ids, way="heads" if mesh.size() == 2 else None)
    with batch.attention():
        hidden = model(batch.input_ids, batch.position_ids)
        model.unshard()
        total = linear_cross_entropy(hidden, model.head.weight, batch.targets, reduction="sum")
        loss = batch.mean(total)
        loss.backward()
    shown = loss.detach().clone()
    disttrain.all_reduce(shown, disttrain.ReduceOp.AVG)
    torch.testing.assert_close(shown, expected.detach())
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)


@on_ranks(4)
def test_means_are_over_the_ranks_of_both_axes() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    reference, model = Model(), Model()
    tokens = torch.cat([rows(9), rows(9, seed=1)])
    labels = tokens.clone()
    labels[:3, :6] = -100
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    hidden = reference(tokens, torch.arange(9).expand_as(tokens))
    F.cross_entropy(reference.head(hidden).flatten(0, 1), targets.flatten()).backward()
    fully_shard(model, mesh=both)
    own = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
    batch = cut_batch(mesh["cp"], tokens[own], labels=labels[own], way="ring")
    with batch.attention():
        hidden = model(batch.input_ids, batch.position_ids)
        model.unshard()
        batch.mean(linear_cross_entropy(hidden, model.head.weight, batch.targets, reduction="sum"), both).backward()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)
    with pytest.raises(MeshError, match="2 axes"):
        batch.mean(torch.zeros(()), mesh)


@on_ranks(2)
def test_without_a_target_the_loss_is_nan_and_its_gradient_zero() -> None:
    batch = cut_batch(axis(), rows(1))
    total = torch.zeros((), requires_grad=True)
    loss = batch.mean(total * 2)
    loss.backward()
    assert loss.isnan()
    assert total.grad == 0


def pretrained(name: str) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf  # here, since it takes seconds and few tests need it

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 20, "max_position_embeddings": 32}
    torch.manual_seed(0)
    if name == "qwen2":
        window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, **window)).double()
    if name.startswith("gemma"):
        kinds = ["sliding_attention", "full_attention"]
        own = {"head_dim": 8, "sliding_window": 3, "layer_types": kinds, "query_pre_attn_scalar": 8}
        if name == "gemma2":
            return hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes, **own, attn_implementation="eager")).double()
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes, **own)).double()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, attn_implementation=name)).double()


@on_ranks(2, 3, timeout_s=360)
@pytest.mark.parametrize("name", ["sdpa", "eager", "qwen2", "gemma3"])
def test_models_of_transformers_train_as_they_are(name: str) -> None:
    mesh, tokens = axis(), rows(11)
    reference, model = pretrained(name), pretrained(name)
    if name != "eager":
        model.gradient_checkpointing_enable()
        use_kernels(model, report=lambda _: None)
    expected = reference(input_ids=tokens, labels=tokens).loss
    expected.backward()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = cut_batch(mesh, tokens, rule=Causal() & SlidingWindow(3) if name == "qwen2" else None)
    model.train()
    with batch.attention():
        # transformers' own loss takes labels that are shifted already.
        told = {"labels": batch.targets, "shift_labels": batch.targets, "num_items_in_batch": 1}
        loss = batch.mean(model(input_ids=batch.input_ids, position_ids=batch.position_ids, **told).loss)
        loss.backward()
    shown = loss.detach().clone()
    disttrain.all_reduce(shown, disttrain.ReduceOp.AVG)
    torch.testing.assert_close(shown, expected.detach())
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)
    is_seen = torch.ones_like(batch.input_ids)
    is_seen[:, 0] = 0
    with batch.attention(), pytest.raises(LayoutError, match=r"attention_mask of shape .* hides 2 positions"):
        model(input_ids=batch.input_ids, attention_mask=is_seen)
    # Behind the block transformers is what it was.
    torch.testing.assert_close(model(input_ids=tokens, labels=tokens).loss, expected)


BART = {"vocab_size": VOCAB, "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 20}
BART |= {"encoder_layers": 1, "encoder_attention_heads": 4, "dropout": 0.0, "max_position_embeddings": 32}


def own_positions_of(name: str) -> Any:
    """Models that count positions where none are given, some of which take none, or make a mask of ones."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf  # here, since it takes seconds and few tests need it

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 20, "max_position_embeddings": 32}
    if name == "bart":
        return (
            hf.BartForCausalLM(hf.BartConfig(**BART, is_encoder_decoder=False, is_decoder=True, use_cache=False))
            .double()
            .eval()
        )
    if name == "biogpt":
        return hf.BioGptForCausalLM(hf.BioGptConfig(**sizes)).double().eval()
    if name == "roberta":
        return hf.RobertaForMaskedLM(hf.RobertaConfig(**sizes, pad_token_id=1)).double().eval()
    return pretrained("sdpa").eval()


@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["llama", "bart", "biogpt", "roberta"])
def test_models_that_are_given_no_positions_have_their_own(name: str) -> None:
    mesh, tokens = axis(), rows(11)
    torch.manual_seed(0)
    model = own_positions_of(name)
    expected = model(input_ids=tokens).logits
    batch = cut_batch(mesh, tokens)
    for told in ({}, {"attention_mask": torch.ones_like(batch.input_ids)}):
        with batch.attention():
            logits = model(input_ids=batch.input_ids, **told).logits
        torch.testing.assert_close(batch.unshard(logits, 1), expected, rtol=1e-6, atol=1e-6)
    # Within documents they begin anew.
    packed = cut_batch(mesh, tokens, document_ids=torch.arange(11) // 6)
    expected = torch.cat([model(input_ids=part).logits for part in tokens.split(6, 1)], 1)
    with packed.attention():
        logits = model(input_ids=packed.input_ids).logits
    torch.testing.assert_close(packed.unshard(logits, 1), expected, rtol=1e-6, atol=1e-6)
    if name == "roberta":
        # It counts from 2, and padding, 1, has no position.
        padded = torch.cat([tokens, torch.ones(len(tokens), 3, dtype=torch.int64)], 1)
        expected = model(input_ids=padded).logits
        batch = cut_batch(mesh, padded)
        for told in ({}, {"position_ids": batch.position_ids}):
            with batch.attention():
                logits = model(input_ids=batch.input_ids, **told).logits
            torch.testing.assert_close(batch.unshard(logits, 1)[:, :11], expected[:, :11], rtol=1e-6, atol=1e-6)
    if name != "llama":
        return
    with batch.attention(), pytest.raises(LayoutError, match=r"a cache of keys.*Generate outside of the block"):
        model.generate(batch.input_ids, max_new_tokens=2, do_sample=False)


@on_ranks(2)
def test_losses_and_scores_of_a_rank_s_part_alone_are_refused() -> None:
    """A model that shifts labels itself lacks the next rank's, and one that scores a sequence has a part of it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf  # here, since it takes seconds and few tests need it

    tokens = rows(11)
    batch = cut_batch(axis(), tokens)
    model = pretrained("sdpa")
    with batch.attention(), pytest.raises(LayoutError, match=r"shifts labels.*shift_labels=batch\.targets"):
        model(input_ids=batch.input_ids, labels=batch.input_ids)
    batch = cut_batch(axis(), tokens)
    scorer = hf.LlamaForSequenceClassification(model.config)
    scorer.config.update({"pad_token_id": VOCAB - 1})
    with batch.attention(), pytest.raises(LayoutError, match=r"gives scores of shape \(2, 2\), without positions"):
        scorer(input_ids=batch.input_ids)


def own_ways(name: str) -> Any:
    """Models that look at other positions in ways of their own."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf  # here, since it takes seconds and few tests need it

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name in ("falcon", "falcon with biases"):
        return hf.FalconForCausalLM(hf.FalconConfig(**sizes, alibi="biases" in name))
    if name == "bloom":
        return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=4))
    if name == "mamba":
        return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1))
    if name == "mobilebert":
        return hf.MobileBertForMaskedLM(hf.MobileBertConfig(**sizes, embedding_size=16, intra_bottleneck_size=16))
    if name == "xlnet":
        return hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=VOCAB, d_model=16, n_layer=1, n_head=4))
    if name == "bart":
        return hf.BartForConditionalGeneration(hf.BartConfig(**BART))
    sizes |= {"intermediate_size": 20, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    return hf.Lfm2ForCausalLM(hf.Lfm2Config(**sizes))


@on_ranks(2, timeout_s=100)
def test_models_that_attend_in_ways_of_their_own_are_refused() -> None:
    mesh, tokens = axis(), rows(11)
    for name, said in (
        ("falcon with biases", "it computes with a mask"),
        ("bloom", "it computes with a mask"),
        ("mamba", "MambaForCausalLM has convolutions"),
        ("xlnet", "XLNetLMHeadModel has called no attention that looks across ranks"),
        ("bart", "BartForConditionalGeneration has two sequences"),
        ("lfm2", "Lfm2ForCausalLM has convolutions"),
        ("mobilebert", "MobileBertForMaskedLM embeds a token with its neighbours"),
    ):
        batch = cut_batch(mesh, tokens)
        with batch.attention(), pytest.raises(DisttrainError, match=said):
            own_ways(name)(input_ids=batch.input_ids)
    # One that asks no registry, but calls torch's function with what it takes for a mask.
    torch.manual_seed(0)
    falcon = own_ways("falcon")
    expected = falcon(input_ids=tokens).logits
    batch = cut_batch(mesh, tokens)
    with batch.attention():
        logits = falcon(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
    torch.testing.assert_close(batch.unshard(logits, 1), expected)


def softmax_as_given(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Without a dtype of its own."""
    return torch.softmax(scores, dim)


def norm_as_given(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Llama's, and Gemma's, whose gains are about zero."""
    gains = self.weight if hasattr(self, "variance_epsilon") else 1 + self.weight
    return gains * F.rms_norm(x, x.shape[-1:], eps=getattr(self, "variance_epsilon", None) or self.eps)


@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["sdpa", "gemma2"])
def test_gradients_in_fp64_are_exact_but_for_what_transformers_has_in_fp32(name: str) -> None:
    """That are norms, and the softmax of eager attention."""
    mesh, tokens = axis(), rows(11)
    reference, model = pretrained(name), pretrained(name)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(type(model.model.norm), "forward", norm_as_given))
        stack.enter_context(mock.patch.object(F, "softmax", softmax_as_given))
        logits = reference(input_ids=tokens).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        batch = cut_batch(mesh, tokens)
        with batch.attention():
            logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
            total = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
            batch.mean(total).backward()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        disttrain.all_reduce(parameter.grad, disttrain.ReduceOp.AVG)
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-11, atol=1e-13)


@on_ranks(2)
def test_batches_that_cannot_be_cut_are_refused_on_all_ranks() -> None:
    mesh, is_odd = axis(), disttrain.get_rank() == 1
    tokens = rows(6)
    with pytest.raises(ShapeError, match=r"input_ids is \(12,\)"):
        cut_batch(mesh, tokens.flatten())
    with pytest.raises(ArgumentError, match="labels and targets"):
        cut_batch(mesh, tokens, labels=tokens, targets=tokens)
    with pytest.raises(ShapeError, match=r"document_ids is \(5,\).*\(2, 6\) or \(6,\)"):
        cut_batch(mesh, tokens, document_ids=torch.zeros(5))
    with pytest.raises(RankMismatchError, match="their length is 6 on rank 0, 5 on rank 1"):
        cut_batch(mesh, tokens[:, 1:] if is_odd else tokens)
    with pytest.raises(ShapeError if is_odd else RankMismatchError, match="targets is" if is_odd else "rank 1"):
        cut_batch(mesh, tokens, targets=tokens[:, :2] if is_odd else tokens)
    with pytest.raises(ShapeError, match="Documents has ids"):
        cut_batch(mesh, tokens, rule=Causal() & Documents(torch.zeros(3)))
    with pytest.raises(DisttrainError, match="Documents has ids" if is_odd else "rank 1 was given"):
        cut_batch(mesh, tokens, rule=Documents(torch.zeros(3)) if is_odd else None)
    with pytest.raises(ArgumentError, match="rule is a str"):
        cut_batch(mesh, tokens, rule="causal")  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="2 axes"):
        cut_batch(disttrain.init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp")), tokens)
    batch = cut_batch(mesh, tokens)
    with batch.attention(), pytest.raises(DisttrainError, match="has 6 positions, and 4 are known"):
        own_positions(4)
    disttrain.barrier()
