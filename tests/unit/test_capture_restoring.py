"""A recording that fails leaves the host as it was, and what the host changes by itself is refused. Without a GPU: what
records the graph runs the step, as a recording does, and may fail."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from disttrain import kernels
from disttrain.compiling import capture_step
from disttrain.compiling.capture import step as step_module
from disttrain.compiling.capture.host import HostState
from disttrain.compiling.capture.subjects import Subjects, keepers_of, roots_of
from disttrain.errors import CompileError

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "kernels.AdamW": partial(kernels.AdamW, lr=0.1),
    "kernels.Lion": partial(kernels.Lion, lr=0.1),
    "kernels.SGD": partial(kernels.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


class FakeGraph:
    """Has the host do its part, as a recording does; of the GPU's there is none."""

    is_released = False

    def __init__(self, step: Callable[[], Any], form: Any, tensors: Any, subjects: Subjects, pool: Any) -> None:
        subjects.prepare()
        self.grads_before = subjects.grads()
        step()

    def recorded(self) -> dict[str, Any]:
        return {}

    def release(self, reason: str) -> None:
        self.is_released = True

    def play_first(self, tensors: Any) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU, and a graph."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(step_module, "StepGraph", FakeGraph)


class Training:
    """A step that clears gradients at its end, and may fail before that."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.average = AveragedModel(self.model, use_buffers=True)
        self.optimizer = kind(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.failing = False
        self.x = torch.randn(6, 4)

    def step(self) -> torch.Tensor:
        loss = self.model(self.x + random.random() + np.random.rand()).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.optimizer.step()
        self.average.update_parameters(self.model)
        if self.failing:
            self.schedule.step()
            raise ValueError("the user's")
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> list[Any]:
        parts = self.model, self.average, self.optimizer, self.schedule, self.scaler
        return [part.state_dict() for part in parts] + [[each.grad for each in self.model.parameters()]]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_counts_once_though_its_recording_has_failed(name: str) -> None:
    states, drawn = [], []
    for fails in (False, True):
        random.seed(0)
        np.random.seed(0)
        training = Training(OPTIMIZERS[name])
        captured = capture_step(training.step, num_warmups=1)
        captured()
        if fails:
            training.failing = True
            with pytest.raises(ValueError, match="the user's"):
                captured()
            training.failing = False
        training.step()
        states.append(copy.deepcopy(training.state()))
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert drawn[0] == drawn[1]


@pytest.mark.usefixtures("gpu")
def test_state_that_a_failed_recording_has_made_is_gone() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    is_first = [True]

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        if not is_first:
            optimizer.step()
            raise ValueError("the user's")
        is_first.clear()

    captured = capture_step(step, num_warmups=1)
    captured()
    grads = [parameter.grad for parameter in model.parameters()]
    with pytest.raises(ValueError, match="the user's"):
        captured()
    assert not optimizer.state
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True))


@pytest.mark.usefixtures("gpu")
def test_what_replays_would_not_change_is_refused_and_put_back() -> None:
    model = nn.BatchNorm1d(2)
    optimizer = kernels.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    grown = torch.optim.Adagrad([nn.Parameter(torch.ones(2))])
    for parameter in (*model.parameters(), *grown.param_groups[0]["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: model(torch.randn(3, 2)), "buffer running_mean lies on the host, and the step changes it"),
        (schedule.step, "the step changes lr of an optimizer"),
        (lambda: scaler.unscale_(optimizer), "the step changes a GradScaler"),
        (grown.step, "step of parameter 0 lies on the host"),
    ]
    for run, words in cases:
        captured = capture_step(run, num_warmups=1)
        captured()
        if "GradScaler" in words:
            scaler.update()
        before = copy.deepcopy((model.state_dict(), schedule.state_dict(), grown.state_dict()))
        with pytest.raises(CompileError, match=words):
            captured()
        assert captured.num_graphs == 0
        torch.testing.assert_close((model.state_dict(), schedule.state_dict(), grown.state_dict()), before)


@pytest.mark.usefixtures("gpu")
def test_random_numbers_of_the_host_are_told() -> None:
    captured = capture_step(lambda: torch.rand(1), num_warmups=1)
    captured()
    with pytest.warns(UserWarning, match="random numbers were drawn on the host"):
        captured()
    assert captured.num_graphs == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silent = capture_step(lambda: torch.ones(1), num_warmups=1)
        silent()
        silent()


def test_the_optimizers_own_counts_are_no_reason_to_refuse() -> None:
    for kind in (kernels.AdamW, kernels.Lion, partial(kernels.SGD, momentum=0.9)):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = torch.ones(3)
        optimizer.step()
        host = HostState(Subjects([optimizer]), ())
        optimizer.state[parameter]["step"] += 1
        assert host.changes() == ""
        host.restore()
        assert optimizer.state[parameter]["step"] == 1


def test_masters_are_compared_after_a_recording_that_failed() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = kernels.AdamW([parameter], lr=0.0, weight_decay=0.0)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        parameter.fill_(2.0)
    host = HostState(Subjects([optimizer]), ())
    optimizer.step()
    host.restore()
    with torch.no_grad():
        parameter.fill_(2.0)
    optimizer.step()
    assert optimizer.state[parameter]["master"].tolist() == [2.0] * 3


def test_two_models_with_the_same_names_are_both_known() -> None:
    teacher, student = nn.Linear(2, 2), nn.Linear(2, 2)
    named = Subjects([teacher, student]).tensors()
    assert len(named) == 4
    assert named["module 0's parameter weight"] is teacher.weight
    assert set(Subjects([student]).tensors()) == {"parameter weight", "parameter bias"}


def test_schedulers_and_scalers_are_found_within_others() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 3)]
    whole = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.update()
        whole.step()

    assert set(map(id, keepers_of(step))) == set(map(id, (scaler, whole, *parts)))
    assert roots_of(step) == [optimizer]
