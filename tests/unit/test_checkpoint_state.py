"""State by name: models, optimizers before and after their first step, generators, and objects with a state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from disttrain.checkpoint import (
    PerRank,
    RngState,
    Stateful,
    Unfilled,
    Value,
    load,
    rng_state,
    save,
    set_rng_state,
    set_training_state,
    training_state,
)
from disttrain.errors import CheckpointError

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "tensor-lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
}


class Model(nn.Module):
    """Tied weights, a buffer that is saved, one that is not, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.inner[0].weight
        self.scale = nn.Parameter(torch.rand(()))
        self.unused = nn.Parameter(torch.rand(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.tied(self.inner(x))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(inputs).square().sum().backward()
    optimizer.step()


def make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    return model, OPTIMIZERS[kind](model.parameters())


def values(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("num_steps_before_load", [0, 1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_by_bit(tmp_path: Path, kind: str, num_steps_before_load: int) -> None:
    model, optimizer = make(kind, 1)
    for number in range(3):
        step(model, optimizer, number)
    save(training_state(model, optimizer), tmp_path / "save")
    other, other_optimizer = make(kind, 2)
    for number in range(num_steps_before_load):
        step(other, other_optimizer, 100 + number)
    state = training_state(other, other_optimizer)
    load(state, tmp_path / "save")
    set_training_state(other, other_optimizer, state)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, other_optimizer, number)
        assert values(other) == values(model)


def test_names_are_the_models(tmp_path: Path) -> None:
    model, optimizer = make("adamw", 1)
    step(model, optimizer, 0)
    state = training_state(model, optimizer)
    assert list(state["model"]) == list(model.state_dict())
    assert list(state["optimizer"]) == [name for name, _ in model.named_parameters()]
    assert set(state["optimizer"]["scale"]["state"]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert isinstance(state["optimizer"]["unused"]["state"], Unfilled)
    assert state["optimizer"]["scale"]["options"].value["lr"] == 0.1
    assert state["model"]["tied.weight"] is state["model"]["inner.0.weight"]


def test_state_before_the_first_step(tmp_path: Path) -> None:
    model, optimizer = make("adamw", 1)
    save(training_state(model, optimizer), tmp_path / "save")
    other, other_optimizer = make("adamw", 2)
    state = training_state(other, other_optimizer)
    load(state, tmp_path / "save")
    set_training_state(other, other_optimizer, state)
    assert values(other) == values(model)
    assert len(other_optimizer.state) == 0


def test_groups_and_their_order_may_change(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 0.5, "weight_decay": 0.1}, {"params": rest, "lr": 0.25}])
    step(model, optimizer, 0)
    save(training_state(model, optimizer), tmp_path / "save")
    other = Model()
    weights = [parameter for parameter in other.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in other.parameters() if parameter.ndim < 2]
    others = [torch.optim.AdamW(rest[::-1]), torch.optim.AdamW([{"params": [weight]} for weight in weights])]
    state = training_state(other, others)
    load(state, tmp_path / "save")
    set_training_state(other, others, state)
    assert [group["lr"] for one in others for group in one.param_groups] == [0.25, 0.5, 0.5]
    step(model, optimizer, 1)
    others[0].zero_grad()
    step(other, others[1], 1)
    others[0].step()
    assert values(other) == values(model)


def test_parameters_with_different_options_cannot_share_a_group(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    apart = torch.optim.SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 2.0}])
    state = training_state(model, apart)
    with pytest.raises(CheckpointError, match="'weight' and 'bias' are in one group now, but had options"):
        set_training_state(model, torch.optim.SGD(model.parameters()), state)


def test_how_to_compute_stays_the_optimizers_own(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = training_state(model, torch.optim.AdamW(model.parameters(), lr=0.5, foreach=True))
    other = torch.optim.AdamW(model.parameters(), foreach=False)
    set_training_state(model, other, state)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["foreach"]) == (0.5, False)


def test_a_strangers_parameter_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"an optimizer has a parameter of shape \(7,\) that the model has not"):
        training_state(nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(7))]))


def test_a_parameter_has_one_optimizer() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="parameter 'weight' is in two optimizers"):
        training_state(model, [torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())])


def test_optimizers_and_state_have_the_same_parameters() -> None:
    model = nn.Linear(2, 2)
    state = training_state(model, torch.optim.SGD([model.weight]))
    with pytest.raises(CheckpointError, match=r"the optimizers have \['bias'\] that the state has not"):
        set_training_state(model, torch.optim.SGD(model.parameters()), state)


def test_a_compiled_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    save(training_state(compiled, torch.optim.SGD(compiled.parameters())), tmp_path / "save")
    other = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(other.parameters())
    state = training_state(other, optimizer)
    load(state, tmp_path / "save")
    set_training_state(other, optimizer, state)
    assert values(other) == values(model)
    set_training_state(compiled, (), {"model": training_state(other)["model"], "optimizer": {}})


def test_modules_and_schedulers_may_stand_in_a_state(tmp_path: Path) -> None:
    model, optimizer = make("sgd", 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for number in range(3):
        step(model, optimizer, number)
        scheduler.step()
    save({"model": model, "scheduler": scheduler}, tmp_path / "save")
    other, other_optimizer = make("sgd", 2)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, 7)
    load({"model": other, "scheduler": other_scheduler}, tmp_path / "save")
    assert values(other) == values(model)
    assert other_scheduler.state_dict() == scheduler.state_dict()


class Loader:
    """Has more in its state as it goes on."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def test_a_stateful_gets_back_what_it_gave(tmp_path: Path) -> None:
    given = {"at": 3, "pending": {"rows": torch.arange(4), "a/b": {"seen": [1, 2]}}}
    save({"loader": Loader(given)}, tmp_path / "save")
    fresh = Loader({})
    assert isinstance(fresh, Stateful)
    load({"loader": fresh}, tmp_path / "save")
    assert fresh.state["pending"].pop("rows").tolist() == [0, 1, 2, 3]
    assert fresh.state == {"at": 3, "pending": {"a/b": {"seen": [1, 2]}}}


def test_a_value_may_have_any_keys(tmp_path: Path) -> None:
    save({"history": Value({"loss": [1.0], 3: None})}, tmp_path / "save")
    state = {"history": Value({"other": 1})}
    load(state, tmp_path / "save")
    assert state == {"history": Value({"loss": [1.0], 3: None})}


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_generators_go_on(tmp_path: Path) -> None:
    draw()
    np.random.standard_normal()  # leaves a second number behind, which is part of the state
    save({"rng": RngState()}, tmp_path / "save")
    expected = draw()
    draw()
    load({"rng": RngState()}, tmp_path / "save")
    assert draw() == expected


def test_the_generators_of_another_rank_make_new_seeds() -> None:
    mine = rng_state()
    expected = draw()
    other = {"generators": PerRank(mine["generators"].value, rank=1)}
    draws = []
    for _ in range(2):
        set_rng_state(other)
        draws.append(draw())
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], expected, strict=True))
    set_rng_state(mine)
    assert draw() == expected
