"""Whatever the stages are, wherever they lie, in whatever order they run: gradients are those of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from disttrain.pipelining import Action, Op, Placement, Schedule
from tests.cases.pipelines import DIM, Case, same_as_whole

VOCAB = 9


class Attention(nn.Module):
    """Over the rows of the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.t()).softmax(-1) @ v


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Scaled(nn.Module):
    """By a weight that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


LAYERS = {
    "linear": lambda: nn.Linear(DIM, DIM),
    "without bias": lambda: nn.Linear(DIM, DIM, bias=False),
    "norm": lambda: nn.LayerNorm(DIM),
    "rms": lambda: nn.RMSNorm(DIM),
    "tanh": nn.Tanh,
    "attention": Attention,
    "residual": lambda: Residual(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU())),
    "scaled": Scaled,
}


class Stage(nn.Module):
    """Sums up what it is given, and runs its layers; the first one looks up tokens before."""

    def __init__(self, names: Sequence[str], is_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM) if is_first else None
        self.layers = nn.Sequential(*(LAYERS[name]() for name in names))

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        x = self.embedding(given[0]) if self.embedding is not None else torch.stack(given).sum(0)
        return self.layers(x)


@st.composite
def plans(draw: st.DrawFn) -> Schedule:
    """A schedule in any order that is possible."""
    num_ranks = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["loop", "v", "any"]))
    if kind == "any":
        others = draw(st.lists(st.integers(0, num_ranks - 1), max_size=3))
        placement = Placement(tuple(draw(st.permutations([*range(num_ranks), *others]))))
    else:
        make = Placement.loop if kind == "loop" else Placement.v
        placement = make(num_ranks, draw(st.integers(1, 2)))
    num = draw(st.integers(1, 4))
    last = placement.num_stages - 1
    is_split = draw(st.lists(st.booleans(), min_size=last + 1, max_size=last + 1))
    waiting = [Action(Op.FORWARD, 0, microbatch) for microbatch in range(num)]
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    while waiting:
        action = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
        op, stage, microbatch, *_ = action
        ranks[placement.ranks[stage]].append(action)
        if op is Op.FORWARD and stage < last:
            waiting.append(action._replace(stage=stage + 1))
        elif op is Op.FORWARD:
            waiting.append(action._replace(op=Op.BACKWARD_INPUT if is_split[stage] else Op.BACKWARD))
        elif op is not Op.BACKWARD_WEIGHT and stage:
            before = stage - 1
            waiting.append(Action(Op.BACKWARD_INPUT if is_split[before] else Op.BACKWARD, before, microbatch))
        if op is Op.BACKWARD_INPUT:
            waiting.append(action._replace(op=Op.BACKWARD_WEIGHT))
    return Schedule("random", placement, num, tuple(map(tuple, ranks)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, Schedule]:
    plan = draw(plans())
    torch.manual_seed(draw(st.integers(0, 1000)))
    stages = [
        Stage(draw(st.lists(st.sampled_from(list(LAYERS)), max_size=3)), is_first=index == 0).double()
        for index in range(plan.num_stages)
    ]
    inputs = {
        index: [(source, 0) for source in range(index) if source == index - 1 or draw(st.integers(0, 3)) == 0]
        for index in range(1, plan.num_stages)
    }
    options: dict[int, dict[str, Any]] = {index: {"inputs": taken} for index, taken in inputs.items()}
    if draw(st.booleans()):
        frozen = draw(st.integers(0, plan.num_stages - 1))
        # One stage at least must be trained.
        stages[frozen].requires_grad_(frozen == 0)

    def whole(stages: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        outputs = [stages[0](*args)]
        for index in range(1, len(stages)):
            outputs.append(stages[index](*(outputs[source] for source, _ in inputs[index])))
        return outputs[-1]

    num_rows = plan.num_microbatches * draw(st.integers(1, 3))
    tokens, labels = torch.randint(0, VOCAB, (num_rows,)), torch.randint(0, DIM, (num_rows,))
    return Case(stages, (tokens,), labels, F.cross_entropy, stage_options=options, whole=whole, atol=1e-10), plan


@settings(max_examples=25)
@given(cases())
def test_any_pipeline(drawn: tuple[Case, Schedule]) -> None:
    same_as_whole(*drawn)
