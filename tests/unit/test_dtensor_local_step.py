"""Optimizers of DTensors: the numbers of one process, whichever way a step goes, and nothing kept alive."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import optim

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard, distribute_tensor
from disttrain.testing import run_threads
from tests.cases.dtensors import counted

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")

Make = Callable[[Sequence[Any]], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adadelta": lambda params: optim.Adadelta(params, lr=0.5),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "adam, amsgrad": lambda params: optim.Adam(params, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamax": lambda params: optim.Adamax(params, lr=0.1),
    "adamw, foreach": lambda params: optim.AdamW(params, lr=0.1, foreach=True),
    "adamw, fused": lambda params: optim.AdamW(params, lr=0.1, fused=True),
    "adamw, one by one": lambda params: optim.AdamW(params, lr=0.1, foreach=False),
    "asgd": lambda params: optim.ASGD(params, lr=0.1),
    "nadam": lambda params: optim.NAdam(params, lr=0.1),
    "radam": lambda params: optim.RAdam(params, lr=0.1),
    "rmsprop, momentum": lambda params: optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "rprop": lambda params: optim.Rprop(params, lr=0.1),
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "sgd, momentum, foreach": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
}
SHAPES = ((5, 3), (1,), (2, 4), (7,))


def parameters(mesh: disttrain.DeviceMesh | None, num_plain: int = 0) -> list[Any]:
    """The same four parameters: plain ones without a mesh, else DTensors that lie in different ways."""
    made: list[Any] = []
    for place, shape in enumerate(SHAPES):
        whole = counted(*shape).div(10)
        if mesh is not None and place >= num_plain:
            whole = distribute_tensor(whole, mesh, [Replicate() if place == 3 else Shard(0)])
        made.append(torch.nn.Parameter(whole))
    return made


def give_gradients(params: Sequence[Any], step: int) -> None:
    for place, param in enumerate(params):
        grad = counted(*param.shape, start=place).add(step).cos()
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_cut(param) else grad


def keep_first(seen: list[Any], optimizer: optim.Optimizer, *_: Any) -> None:
    seen.append(optimizer)


def give_others(params: Sequence[Any], *_: Any) -> None:
    give_gradients(params, 7)


def is_cut(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    torch.testing.assert_close([whole(tensor.detach()) for tensor in found], [tensor.detach() for tensor in wanted])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_plain", [0, 2])
def test_steps_are_those_of_one_process(name: str, num_plain: int) -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (3,))
        cut, alone = parameters(mesh, num_plain), parameters(None)
        ours, plain = OPTIMIZERS[name](cut), OPTIMIZERS[name](alone)
        schedules = [optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (ours, plain)]
        for step in range(4):
            for params, optimizer in ((cut, ours), (alone, plain)):
                give_gradients(params, step)
                if step == 2:
                    params[2].grad = None
                optimizer.step()
            for schedule in schedules:
                schedule.step()
            assert_same(cut, alone)
        for param, other in zip(cut, alone, strict=True):
            mine, single = ours.state[param], plain.state[other]
            assert mine.keys() == single.keys()
            for key, value in mine.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(whole(value), single[key])
                    assert isinstance(value, DTensor) == (is_cut(param) and value.ndim > 0)

    run_threads(3, body)


@pytest.mark.parametrize("num_cut", [0, 4])
def test_a_group_may_be_empty(num_cut: int) -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        some, alone = parameters(mesh, 4 - num_cut), parameters(None)
        ours, plain = (optim.AdamW([{"params": []}, {"params": params}], lr=0.1) for params in (some, alone))
        for number in range(3):
            for params, optimizer in ((some, ours), (alone, plain)):
                give_gradients(params, number)
                optimizer.step()
            assert_same(some, alone)

    run_threads(2, body)


def test_what_is_replaced_between_steps_is_noticed() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        cut, alone = parameters(mesh), parameters(None)
        ours, plain = optim.AdamW(cut, lr=0.1), optim.AdamW(alone, lr=0.1)
        pairs = ((cut, ours), (alone, plain))

        def step(number: int) -> None:
            for params, optimizer in pairs:
                give_gradients(params, number)
                optimizer.step()
            assert_same(cut, alone)

        step(0)
        step(1)
        for params, optimizer in pairs:
            optimizer.load_state_dict(optimizer.state_dict())
            params[0].data = params[0].data.clone().mul(2)
        step(2)
        for params, optimizer in pairs:
            moments = optimizer.state[params[2]]
            moments["exp_avg"] = moments["exp_avg"].clone().mul(3)
            moments["exp_avg_sq"].data = moments["exp_avg_sq"].data.clone().add(1)
        step(3)
        for params, optimizer in pairs:
            optimizer.state[params[1]].clear()
            optimizer.param_groups[0]["weight_decay"] = 0.5
        step(4)
        for params, optimizer in pairs:
            optimizer.add_param_group({"params": [torch.nn.Parameter(params[0].detach().clone())], "lr": 0.25})
        cut.append(ours.param_groups[1]["params"][0])
        alone.append(plain.param_groups[1]["params"][0])
        step(5)
        step(6)

    run_threads(2, body)


def test_a_closure_gives_the_gradients_that_are_used() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        cut, alone = parameters(mesh), parameters(None)
        for params in (cut, alone):
            optimizer = optim.SGD(params, lr=0.1)
            for number in range(2):
                optimizer.step(functools.partial(give_gradients, params, number))
        assert_same(cut, alone)

    run_threads(2, body)


def test_hooks_see_the_optimizer_and_may_change_gradients() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        cut, alone = parameters(mesh), parameters(None)
        for params in (cut, alone):
            optimizer = optim.AdamW(params, lr=0.1)
            seen: list[Any] = []
            optimizer.register_step_post_hook(functools.partial(keep_first, seen))
            for number in range(3):
                if number == 2:
                    optimizer.register_step_pre_hook(functools.partial(give_others, params))
                give_gradients(params, number)
                optimizer.step()
            assert seen == [optimizer] * 3
        assert_same(cut, alone)

    run_threads(2, body)


def test_gradients_are_free_after_the_step() -> None:
    def body() -> None:
        params = parameters(disttrain.init_device_mesh("cpu", (2,)))
        optimizer = optim.AdamW(params)
        for number in range(3):
            give_gradients(params, number)
            optimizer.step()
        parts = [weakref.ref(param.grad._local_tensor) for param in params]
        optimizer.zero_grad()
        gc.collect()
        assert [part() for part in parts] == [None] * len(params)

    run_threads(2, body)
