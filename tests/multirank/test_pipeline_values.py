"""Whatever stages hand to each other: nests, constants, integers, views, what nobody uses, what has no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from disttrain.pipelining import TensorChunkSpec
from tests.cases.pipelines import DIM, Case, mean_square, mlp, rows, same_as_whole

SCHEDULES = ["1F1B", "ZB-H1"]


class Apply(nn.Module):
    """A layer, and a function of what it is given and of the layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM).double()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layer, *args, **kwargs)


def check(*functions: Callable[..., Any], schedule: str = "1F1B", **case: Any) -> Any:
    """One stage per function, and per rank."""
    torch.manual_seed(0)
    stages = [Apply(function) for function in functions]
    given = {"args": (rows(8),), "target": rows(8, seed=2), **case}
    return same_as_whole(Case(stages, **given), schedule, len(stages))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nests(schedule: str) -> None:
    check(
        lambda layer, x: ({"a": layer(x), "b": [x, None, "text", 3]}, (layer(x).relu(), 2.5)),
        lambda layer, nest, pair: {"sum": layer(nest["a"]) + nest["b"][0] * nest["b"][3] + pair[0] * pair[1]},
        lambda layer, nest: layer(nest["sum"]),
        schedule=schedule,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_integers_and_bools_between_stages(schedule: str) -> None:
    check(
        lambda layer, x: (layer(x), x > 0, torch.arange(x.numel()).view(x.shape), (x > 0).to(torch.int8)),
        lambda layer, x, mask, places, small: (layer(x) * mask, places * small, mask),
        lambda layer, x, places, mask: layer(x) + places * mask,
        schedule=schedule,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "middle",
    [
        lambda layer, x, y: (x, y),
        lambda layer, x, y: (y, x),
        lambda layer, x, y: (x, x),
        lambda layer, x, y: (x.view(-1).view(x.shape), y.detach()),
        lambda layer, x, y: (x.t(), y[::2]),
        lambda layer, x, y: (layer.weight, x),
        lambda layer, x, y: (layer(x), layer.bias),
    ],
    ids=["both", "swapped", "twice", "views", "strided", "weight", "bias"],
)
def test_outputs_that_were_given(middle: Callable[..., Any], schedule: str) -> None:
    check(
        lambda layer, x: (layer(x), x * 2),
        middle,
        lambda layer, x, y: layer(torch.ones(2, DIM).double()) * x.sum() + (y * y).sum(),
        schedule=schedule,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_nobody_uses_has_a_gradient_of_zeros(schedule: str) -> None:
    check(
        lambda layer, x: (layer(x), x @ x.t()),
        lambda layer, x, unused: (x * 2, layer(x)),
        lambda layer, x, unused: layer(x),
        schedule=schedule,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_some_without_gradient(schedule: str) -> None:
    check(
        lambda layer, x: (layer(x).detach(), layer(x)),
        lambda layer, x, y: (x + 1, layer(x) + y),
        lambda layer, x, y: layer(x) * y,
        schedule=schedule,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_in_the_middle_has_a_gradient(schedule: str) -> None:
    """Stages before get none, and wait for none."""
    torch.manual_seed(0)
    stages = mlp(4)
    stages[0].requires_grad_(False)
    stages[1].requires_grad_(False)
    stages[2][0].weight.requires_grad_(False)
    same_as_whole(Case(stages, (rows(8),), rows(8, seed=2)), schedule, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_frozen_stage_hands_gradients_on(schedule: str) -> None:
    stages = mlp(3)
    stages[1].requires_grad_(False)
    same_as_whole(Case(stages, (rows(8),), rows(8, seed=2)), schedule, 3)
    stages = mlp(3)
    stages[2].requires_grad_(False)
    same_as_whole(Case(stages, (rows(8),), rows(8, seed=2)), schedule, 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_gaps_travel(schedule: str) -> None:
    check(
        lambda layer, x: layer(x).t(),
        lambda layer, x: layer(x.t()).unflatten(1, (2, 3)).transpose(1, 2),
        lambda layer, x: layer(x.transpose(1, 2).flatten(1))[:, :].expand(-1, -1),
        schedule=schedule,
    )


def test_no_rows() -> None:
    check(
        lambda layer, x: (layer(x), x[:0], x.new_empty(0, 3)),
        lambda layer, x, none, empty: (layer(x) + none.sum(), layer(none), empty * 2),
        lambda layer, x, none, empty: layer(x) + none.sum() + empty.sum(),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_keywords_for_every_stage(schedule: str) -> None:
    torch.manual_seed(0)
    keywords = {"scale": rows(8, seed=3), "options": {"bias": torch.ones(DIM).double(), "name": "text", "power": 2}}

    def stage(layer: nn.Module, x: torch.Tensor, *, scale: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        assert options["name"] == "text"
        return layer(x).tanh() * scale + options["bias"] ** options["power"]

    spec = {"scale": TensorChunkSpec(0), "options": None}
    check(*[stage] * 3, schedule=schedule, kwargs=keywords, options={"kwargs_chunk_spec": spec})


def test_arguments_of_other_kinds() -> None:
    check(
        lambda layer, x, mode, flag, table: (layer(x) * (2 if flag else 1), mode, table["more"]),
        lambda layer, x, mode, more: layer(x) if mode == "train" else more,
        args=(rows(8), "train", True, {"more": None}),
    )


def test_targets_and_outputs_nested() -> None:
    def loss_fn(output: dict[str, torch.Tensor], target: tuple[Any, ...], *, weight: float) -> torch.Tensor:
        first, rest = target
        return mean_square(output["x"], first) * weight + mean_square(output["y"], rest["second"])

    found = check(
        lambda layer, x: layer(x),
        lambda layer, x: {"x": layer(x), "y": x.tanh(), "count": 3},
        target=(rows(8, seed=2), {"second": rows(8, seed=3)}),
        loss_fn=loss_fn,
        loss_kwargs={"weight": 0.5},
    )
    assert found[1].outputs[0]["count"] == 3


def test_a_loss_per_token() -> None:
    """Microbatches of unequal weight: the sum over tokens, divided by the batch's count."""
    target = torch.randint(0, DIM, (8,), generator=torch.Generator().manual_seed(5))
    target[:3] = -100

    def loss_fn(output: torch.Tensor, target: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="sum") / num_tokens

    (_, last) = check(
        lambda layer, x: layer(x).tanh(),
        lambda layer, x: layer(x),
        target=target,
        loss_fn=loss_fn,
        loss_kwargs={"num_tokens": 5},
        options={"scale_grads": False},
    )
    output = last.outputs[0]
    expected = nn.functional.cross_entropy(output, target)
    torch.testing.assert_close(torch.stack(last.losses[0]).sum(), expected, rtol=1e-12, atol=0)


def test_without_a_loss() -> None:
    check(lambda layer, x: layer(x), lambda layer, x: layer(x), loss_fn=None)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inputs_of_the_first_stage_may_want_a_gradient(schedule: str) -> None:
    x = rows(8).requires_grad_()
    check(lambda layer, x: layer(x).tanh(), lambda layer, x: layer(x), args=(x,), schedule=schedule)


def test_bfloat16() -> None:
    torch.manual_seed(0)
    stages = [stage.to(torch.bfloat16) for stage in mlp(3)]
    given = rows(8).bfloat16(), rows(8, seed=2).bfloat16()
    same_as_whole(Case(stages, given[:1], given[1]), "1F1B", 3)
