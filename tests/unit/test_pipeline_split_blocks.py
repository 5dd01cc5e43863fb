"""Stages, one after the other, are the whole model."""

from __future__ import annotations

import copy
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from disttrain.errors import ScheduleError
from disttrain.pipelining.model.block_stages import split_blocks
from disttrain.pipelining.model.parts import find_parts, measure_costs
from disttrain.pipelining.model.stages import SplitModel
from disttrain.pipelining.schedule.balance import BlockCosts, balance
from tests.cases.tensor_parallel import Decoder

TOKENS = torch.randint(0, 16, (2, 6))
SMALL = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def llama(tied: bool = False) -> nn.Module:
    import transformers as hf  # here, since it takes seconds and few tests need it

    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_hidden_layers=4, tie_word_embeddings=tied))


def qwen() -> nn.Module:
    """Its blocks look at near and far tokens in turns, which the model looks up by their number."""
    import transformers as hf  # here, as above

    config = hf.Qwen2Config(
        **SMALL, num_hidden_layers=4, use_sliding_window=True, sliding_window=2, max_window_layers=1
    )
    return hf.Qwen2ForCausalLM(config)


def gpt2() -> nn.Module:
    import transformers as hf  # here, as above

    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=3, n_head=2))


def logits(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


def same_as_whole(model: nn.Module, num_stages: int, **options: Any) -> SplitModel:
    """Outputs, gradients and names, in fp64, with dropout at the same places."""
    torch.manual_seed(0)
    model = model.double().train()
    model.zero_grad()
    reference = copy.deepcopy(model)
    split = split_blocks(model, num_stages, **options)
    assert len(split.stages) == num_stages
    torch.manual_seed(1)
    expected = logits(reference(TOKENS))
    expected.square().sum().backward()
    torch.manual_seed(1)
    x = TOKENS
    for stage in split.stages:
        x = stage(x)
    found = logits(x)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    names = dict(reference.named_parameters(remove_duplicate=False))
    seen: set[str] = set()
    for stage in split.stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            seen.add(name)
            torch.testing.assert_close(parameter.grad, names[name].grad, rtol=1e-12, atol=1e-12)
        assert set(stage.state_dict()) <= set(reference.state_dict())
    assert seen == set(names)
    return split


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [llama, qwen])
def test_decoders_of_transformers(make: Any, num_stages: int) -> None:
    assert same_as_whole(make(), num_stages).wiring.ties == ()


@pytest.mark.parametrize("num_stages", [2, 3])
def test_gpt2_whose_head_is_its_embedding(num_stages: int) -> None:
    split = same_as_whole(gpt2(), num_stages)
    last = num_stages - 1
    assert split.wiring.ties == ((0, last),)
    (tied,) = split.tied
    assert tied.names == {0: ("transformer.wte.weight",), last: ("lm_head.weight",)}


def test_a_mask_is_given_to_every_stage() -> None:
    model = llama(tied=True).double()
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    expected = model(TOKENS, attention_mask=mask).logits
    x: Any = TOKENS
    for stage in split_blocks(model, 2).stages:
        x = stage(x, attention_mask=mask)
    assert torch.equal(x.logits, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_conventions(tied: bool) -> None:
    split = same_as_whole(Decoder(num_blocks=4, tied=tied), 3, boundaries=[1, 3])
    assert next(name for name, _ in split.stages[1].named_parameters()).startswith("blocks.1.")
    assert split.wiring.ties == (((0, 2),) if tied else ())


def test_a_sequence() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Dropout(0.5), nn.Linear(8, 16))
    same_as_whole(model, 3)
    same_as_whole(model, 2, boundaries=[6])


class Shared(nn.Module):
    """Like ALBERT's: one block, four times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleDict({f"layer{place}": nn.Linear(8, 8) for place in range(2)})
        self.layers["layer2"] = self.layers["layer0"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x).relu()
        return x


def test_a_block_that_stands_twice() -> None:
    split = same_as_whole(Shared(), 3)
    assert split.wiring.ties == ((0, 2),)
    assert [weight.names[2] for weight in split.tied] == [("layers.layer2.weight",), ("layers.layer2.bias",)]


def test_stages_of_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = llama()
    split = split_blocks(model, 2)
    assert all(parameter.is_meta for stage in split.stages for parameter in stage.parameters())
    shared = {*split.stages[0].parameters(), *split.stages[1].parameters()}
    assert shared == set(model.parameters())


class Tuples(nn.Module):
    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return (super().forward(x),)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)[0]
        return x


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


def test_what_cannot_be_cut_so_is_refused() -> None:
    with pytest.raises(ScheduleError, match="A Block returns a tuple, and not one tensor"):
        split_blocks(Tuples(), 2).stages[1](torch.ones(3, 2, 8))
    with pytest.raises(ScheduleError, match="has a parameter 'positions' of its own"):
        split_blocks(OwnParameter(), 2)
    with pytest.raises(ScheduleError, match="no list of like modules"):
        split_blocks(nn.Linear(2, 2), 2)
    with pytest.raises(ScheduleError, match="4 blocks cannot make 5 stages"):
        split_blocks(Decoder(num_blocks=4), 5)
    with pytest.raises(ScheduleError, match=r"\[2\] don't cut 4 blocks into 3 stages"):
        split_blocks(Decoder(num_blocks=4), 3, boundaries=[2])
    with pytest.raises(ScheduleError, match="no module 'layers'"):
        split_blocks(Decoder(num_blocks=4), 3, blocks="layers")
    with pytest.raises(ScheduleError, match="'norm' is a RMSNorm"):
        split_blocks(Decoder(num_blocks=4), 3, blocks="norm")
    with pytest.raises(ScheduleError, match="costs of 1"):
        split_blocks(Decoder(num_blocks=4), 3, costs=BlockCosts((1,)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 9), st.integers(0, 9), st.data())
def test_no_other_cut_is_better(costs: list[int], before: int, after: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    def dearest(cuts: tuple[int, ...]) -> int:
        ends = [0, *cuts, len(costs)]
        sums = [sum(costs[first:end]) for first, end in pairwise(ends)]
        sums[0] += before
        sums[-1] += after
        return max(sums)

    cuts = balance(BlockCosts(tuple(costs), before, after), num_stages)
    assert len(cuts) == num_stages - 1
    assert dearest(cuts) == min(map(dearest, combinations(range(1, len(costs)), num_stages - 1)))


def test_a_head_counts_as_what_it_multiplies() -> None:
    """An embedding of as many elements does not."""
    model = Decoder(num_blocks=4)
    model.head = nn.Linear(8, 200)
    assert split_blocks(model, 2).stages[1]._part.unchecked == [model.blocks[3]]


def test_costs_are_measured() -> None:
    model = Decoder(num_blocks=3)
    costs = measure_costs(model, (TOKENS,))
    assert len(costs.blocks) == 3
    assert all(seconds > 0 for seconds in (*costs.blocks, costs.before, costs.after))
    assert len(find_parts(model).before) == 1
    assert [type(one) for one in find_parts(model).after] == [nn.RMSNorm, nn.Linear]
    assert not model.blocks[0]._forward_hooks
