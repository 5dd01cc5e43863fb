"""torch's optimizers, what goes over parameters beside them, and terms of a loss that are of parameters, under
`fully_shard`: the values of one process, also where nothing has used a parameter."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import disttrain
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads

NUM_ROWS: Final = 8
Term = Callable[[nn.Module], Any]


class Unused(nn.Module):
    """A model of which a layer and a parameter are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.unused, self.down = nn.Linear(8, 6), nn.Linear(5, 3), nn.Linear(6, 2)
        self.scale, self.idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x))) * self.scale.sum()
        return y


def drawn() -> tuple[nn.Module, torch.Tensor]:
    """In the test's own thread: ranks that are threads share torch's generator."""
    torch.manual_seed(0)
    return Unused().double(), torch.randn(NUM_ROWS, 8, dtype=torch.float64)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def trained(
    model: nn.Module,
    rows: torch.Tensor,
    optimizer_of: Callable[..., Any],
    penalty: Term = lambda _: 0.0,
    loss_of: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.square().mean(),
    after: Term = lambda _: None,
    schedule: Callable[[Any], Any] | None = None,
) -> list[torch.Tensor]:
    """The parameters after three steps."""
    takes_matrices_only = _kind(optimizer_of).__name__ == "Muon"
    optimizer = optimizer_of([one for one in model.parameters() if one.ndim == 2 or not takes_matrices_only])
    scheduler = None if schedule is None else schedule(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(rows)) + penalty(model)
        loss.backward()
        after(model)
        # LBFGS decides by it, and ranks with other rows would decide otherwise.
        mean = whole(loss).clone()
        if disttrain.is_initialized():
            disttrain.all_reduce(mean, disttrain.ReduceOp.AVG)
        return mean

    for _ in range(3):
        if _kind(optimizer_of) is torch.optim.LBFGS:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [whole(parameter) for parameter in model.parameters()]


def sharded_trained(
    model: nn.Module, rows: torch.Tensor, arguments: dict[str, Any], *, by_layer: bool = True
) -> list[torch.Tensor]:
    """The same on this rank's rows."""
    model = copy.deepcopy(model)
    for layer in model.children() if by_layer else ():
        fully_shard(layer)
    return trained(fully_shard(model), rows.chunk(disttrain.get_world_size())[disttrain.get_rank()], **arguments)


def check(*, atol: float = 1e-10, **arguments: Any) -> None:
    model, rows = drawn()
    expected = trained(copy.deepcopy(model), rows, **arguments)
    for by_layer in (True, False):
        for got in run_threads(2, partial(sharded_trained, model, rows, arguments, by_layer=by_layer)):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=atol)


def _kind(optimizer_of: Callable[..., Any]) -> Any:
    return getattr(optimizer_of, "func", optimizer_of)


def _optimizers() -> dict[str, Callable[..., Any]]:
    """All of torch's that take dense gradients, with each option that a CPU has."""
    kinds = [
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if kind not in (torch.optim.Optimizer, torch.optim.SparseAdam)
    ]
    options: dict[str, dict[str, Any]] = {
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "maximize": {"maximize": True},
        "amsgrad": {"amsgrad": True},
        "centered": {"centered": True},
        "nesterov": {"nesterov": True, "momentum": 0.9},
        "line_search_fn": {"line_search_fn": "strong_wolfe"},
    }
    named: dict[str, Callable[..., Any]] = {}
    for kind in kinds:
        taken = inspect.signature(kind).parameters
        named[kind.__name__] = kind
        for name, option in options.items():
            if name in taken and set(option) <= set(taken):
                named[f"{kind.__name__} {name}"] = partial(kind, **option)
    return named


OPTIMIZERS: Final = _optimizers()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_s_optimizers(name: str) -> None:
    check(optimizer_of=OPTIMIZERS[name], atol=2e-4 if name == "Muon" else 1e-10)  # Muon computes its steps in bfloat16.


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_muon_differs_by_bfloat16_alone(adjust_lr_fn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its iteration rounds each product to bfloat16, and a sum over ranks rounds each rank's term. Without rounding the
    steps are the same: the ratio that scales them is of the whole's shape, and so is the norm."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    check(optimizer_of=partial(torch.optim.Muon, adjust_lr_fn=adjust_lr_fn), atol=1e-15)


def test_all_optimizers_of_torch_are_there() -> None:
    assert {"LBFGS", "LBFGS line_search_fn", "Adafactor", "AdamW fused", "Muon", "SGD nesterov"} <= set(OPTIMIZERS)


@pytest.mark.parametrize(
    "penalty",
    [
        lambda model: 0.01 * sum(p.pow(2).sum() for p in model.parameters()),
        lambda model: 0.01 * sum(p.abs().sum() for p in model.parameters()),
        lambda model: 0.01 * torch.stack([p.norm() for p in model.parameters()]).sum(),
        lambda model: 0.01 * parameters_to_vector(model.parameters()).norm(),
    ],
    ids=["squares", "magnitudes", "norms", "vector"],
)
@pytest.mark.parametrize(
    "loss_of",
    [
        lambda y: y.square().mean(),
        lambda y: F.mse_loss(y, torch.ones_like(y)),
        lambda y: F.cross_entropy(y, torch.arange(len(y)) % 2),
        lambda y: F.binary_cross_entropy_with_logits(y, torch.ones_like(y)),
    ],
    ids=["plain", "mse", "cross entropy", "bce"],
)
def test_a_penalty_on_parameters(penalty: Term, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The loss is a DTensor then, and its gradient comes to the model's plain output as one."""
    check(optimizer_of=partial(torch.optim.SGD, lr=0.05), penalty=penalty, loss_of=loss_of)


def _doubled(model: nn.Module) -> None:
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(model.parameters()) * 2, model.parameters())


@pytest.mark.parametrize(
    "after",
    [
        lambda model: clip_grad_value_(model.parameters(), 1e-3),
        lambda model: clip_grad_value_(model.parameters(), 1e-3, foreach=False),
        _doubled,
    ],
    ids=["clipped", "clipped one by one", "as a vector"],
)
def test_what_goes_over_all_parameters(after: Term) -> None:
    check(optimizer_of=partial(torch.optim.SGD, lr=0.05), after=after)


@pytest.mark.parametrize(
    "schedule",
    [
        partial(lr_scheduler.StepLR, step_size=1),
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10),
        partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1),
        partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    ],
    ids=lambda schedule: schedule.func.__name__,
)
def test_schedulers(schedule: Callable[[Any], Any]) -> None:
    check(optimizer_of=partial(torch.optim.SGD, lr=0.05, momentum=0.9), schedule=schedule)


def averages(model: nn.Module, rows: torch.Tensor, shard: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
    """Of weights over three steps, by the plain mean and by an exponential one."""
    model = shard(copy.deepcopy(model))
    averaged = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for each in averaged:
            each.update_parameters(model)
    outputs = [whole(each(rows)) for each in averaged]
    return outputs + [whole(parameter) for each in averaged for parameter in each.parameters()]


def test_averages_of_weights() -> None:
    model, rows = drawn()
    expected = averages(model, rows, lambda plain: plain)
    for got in run_threads(2, averages, model, rows, fully_shard):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
