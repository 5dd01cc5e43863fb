"""Connections that skip stages, weights that several stages share, and models that are cut into such."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.pipelining import (
    Pipe,
    PipelineSchedule,
    Placement,
    Schedule,
    SplitModel,
    SplitPoint,
    make_schedule,
    pipeline,
    split_blocks,
)
from disttrain.testing import run_threads
from tests.cases.pipelines import DIM, Case, Result, close, mlp, rows, same_as_whole

PLANS = [("1F1B", 4, 1), ("ZB-H1", 4, 1), ("Interleaved1F1B", 2, 2), ("ZBV", 2, 2), ("LoopedBFS", 1, 4)]
KINDS = [f"{name}-{num_ranks}x{per_rank}" for name, num_ranks, per_rank in PLANS]


class Joined(nn.Module):
    """Adds up what it is given before its layer; returns that, and its layer's value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM).double()

    def forward(self, *given: torch.Tensor) -> Any:
        x = torch.stack(given).sum(0)
        return self.layer(x).tanh(), x * 2


class Last(Joined):
    def forward(self, *given: torch.Tensor) -> Any:
        return super().forward(*given)[0]


INPUTS: dict[str, dict[int, list[tuple[int, int]]]] = {
    "far": {1: [(0, 0)], 2: [(1, 0), (0, 1)], 3: [(2, 0), (0, 0), (1, 1)]},
    "nothing of the stage before": {1: [(0, 0)], 2: [(0, 1)], 3: [(1, 0), (2, 1)]},
    "one several times": {1: [(0, 0), (0, 0)], 2: [(0, 0), (1, 0)], 3: [(0, 0), (2, 1), (0, 0), (2, 0)]},
}


@pytest.mark.parametrize("plan", PLANS, ids=KINDS)
@pytest.mark.parametrize("wiring", list(INPUTS))
def test_skips_by_hand(wiring: str, plan: tuple[str, int, int]) -> None:
    name, num_ranks, per_rank = plan
    inputs = INPUTS[wiring]

    def whole(stages: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        outputs = [stages[0](*args)]
        for index in (1, 2, 3):
            outputs.append(stages[index](*(outputs[source][which] for source, which in inputs[index])))
        return outputs[-1]

    torch.manual_seed(0)
    options = {index: {"inputs": values} for index, values in inputs.items()}
    stages: list[nn.Module] = [Joined(), Joined(), Joined(), Last()]
    given = Case(stages, (rows(8),), rows(8, seed=2), stage_options=options, whole=whole)
    same_as_whole(given, make_schedule(name, num_ranks, 4, per_rank))


class Tied(nn.Module):
    """Two layers; the first one may be another stage's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(DIM, DIM).double()
        self.own = nn.Linear(DIM, DIM).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(x).tanh()) + x


TIES = {
    "first and last": {"weight": (0, 3)},
    "neighbours": {"weight": (1, 2)},
    "three": {"weight": (0, 1, 3)},
    "all, and others": {"weight": (0, 1, 2, 3), "bias": (1, 3)},
}


@pytest.mark.parametrize("plan", PLANS, ids=KINDS)
@pytest.mark.parametrize("ties", list(TIES))
def test_ties_by_hand(ties: str, plan: tuple[str, int, int]) -> None:
    """Gradients of both steps add up, each summed over all stages that have the weight."""
    name, num_ranks, per_rank = plan
    torch.manual_seed(0)
    stages = [Tied() for _ in range(4)]
    options: dict[int, dict[str, Any]] = {}
    for parameter, members in TIES[ties].items():
        for index in members:
            setattr(stages[index].shared, parameter, getattr(stages[members[0]].shared, parameter))
            options.setdefault(index, {"tied": {}})["tied"][f"the {parameter}"] = f"shared.{parameter}"
    given = Case(stages, (rows(8),), rows(8, seed=2), stage_options=options, atol=1e-11)
    found = same_as_whole(given, make_schedule(name, num_ranks, 4, per_rank))
    grads = [
        result.stages[index].shared.weight.grad
        for index in TIES[ties]["weight"]
        for result in found
        if index in result.stages
    ]
    # The same to the last bit: copies of a weight must not drift apart.
    assert all(torch.equal(grad, grads[0]) for grad in grads)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_a_tied_weight_that_is_not_trained(name: str) -> None:
    torch.manual_seed(0)
    stages = [Tied() for _ in range(2)]
    stages[1].shared.weight = stages[0].shared.weight
    stages[0].shared.weight.requires_grad_(False)
    options = {index: {"tied": {"w": "shared.weight"}} for index in (0, 1)}
    same_as_whole(Case(stages, (rows(8),), rows(8, seed=2), stage_options=options), name)


def logits_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


SMALL = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}


def llama() -> nn.Module:
    import transformers as hf  # here, since it takes seconds and few tests need it

    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**SMALL, num_key_value_heads=1, num_hidden_layers=4, tie_word_embeddings=True)
    )


def gpt2() -> nn.Module:
    import transformers as hf  # here, as above

    config = hf.GPT2Config(
        vocab_size=16,
        n_positions=8,
        n_embd=8,
        n_layer=4,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hf.GPT2LMHeadModel(config)


class UNet(nn.Module):
    """What goes down comes up again past the stages between; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        skips = []
        for layer in self.down:
            x = layer(x).tanh()
            skips.append(x)
        if scale is not None:
            x = x * scale
        for layer in self.up:
            x = layer(x).tanh() + skips.pop()
        return self.norm(x) @ self.embedding.weight.t()


def _train_split(builds: Sequence[SplitModel | Pipe], plan: Schedule, kwargs: dict[str, Any]) -> Result:
    split = builds[disttrain.get_rank()]
    own = plan.placement.stages[disttrain.get_rank()]
    built = [split.build_stage(index, "cpu") for index in own]
    runner = PipelineSchedule(built, plan, logits_loss)
    result = Result(stages={stage.stage_index: stage.submod for stage in built})
    for _ in range(2):
        losses: list[torch.Tensor] = []
        runner.step(
            *((TOKENS,) if 0 in own else ()),
            target=LABELS if plan.num_stages - 1 in own else None,
            losses=losses,
            **kwargs,
        )
        result.losses.append(losses)
    return result


TOKENS = torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(1))


def split_as_whole(
    model: nn.Module, cut: Callable[[nn.Module, int], SplitModel | Pipe], plan: Schedule, **kwargs: Any
) -> None:
    reference = copy.deepcopy(model)
    for _ in range(2):
        loss = logits_loss(reference(TOKENS, **kwargs), LABELS)
        loss.backward()
    builds = [cut(copy.deepcopy(model), plan.num_stages) for _ in range(plan.num_ranks)]
    found = run_threads(plan.num_ranks, _train_split, builds, plan, kwargs)
    close(torch.stack(found[plan.placement.ranks[-1]].losses[1]).mean(), loss, 1e-12)
    names = dict(reference.named_parameters(remove_duplicate=False))
    seen = set()
    for result in found:
        for stage in result.stages.values():
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                seen.add(name)
                close(parameter.grad, names[name].grad, 1e-11, name)
    assert seen == set(names)


@pytest.mark.parametrize("plan", PLANS, ids=KINDS)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_models_of_blocks(make: Callable[[], nn.Module], plan: tuple[str, int, int]) -> None:
    name, num_ranks, per_rank = plan
    torch.manual_seed(0)
    split_as_whole(make().double(), split_blocks, make_schedule(name, num_ranks, 4, per_rank))


def _cut_unet(model: nn.Module, num_stages: int, scale: torch.Tensor | None = None) -> Pipe:
    places = {2: ["up.0"], 4: ["down.1", "up.0", "up.2"]}[num_stages]
    kwargs = {} if scale is None else {"scale": scale[:2]}
    return pipeline(model, (TOKENS[:2],), kwargs, dict.fromkeys(places, SplitPoint.BEGINNING))


@pytest.mark.parametrize("plan", PLANS, ids=KINDS)
def test_a_graph_with_skips_and_a_tied_weight(plan: tuple[str, int, int]) -> None:
    name, num_ranks, per_rank = plan
    torch.manual_seed(0)
    split_as_whole(UNet().double(), _cut_unet, make_schedule(name, num_ranks, 4, per_rank))


def test_a_graph_with_keywords() -> None:
    """Given to the first stage; others of its rank do without."""
    torch.manual_seed(0)
    scale = torch.rand(8, 1, 8).double()
    plan = make_schedule("Interleaved1F1B", 2, 4)
    split_as_whole(UNet().double(), lambda model, num: _cut_unet(model, num, scale), plan, scale=scale)


def test_any_placement() -> None:
    """Three stages on one rank, one on another."""
    forward_only = make_schedule("GPipe", 1, 4)
    assert forward_only.num_stages == 1
    placement = Placement((0, 1, 0, 0))
    order = lambda rank: [  # noqa: E731
        action._replace(stage=stage)
        for op in ("F", "B")
        for action in forward_only.ranks[0]
        if action.op == op
        for stage in (placement.stages[rank] if op == "F" else placement.stages[rank][::-1])
    ]
    plan = Schedule("by hand", placement, 4, (tuple(order(0)), tuple(order(1))))
    same_as_whole(Case(mlp(4), (rows(8),), rows(8, seed=2)), plan)
