"""Models that nobody has any more give their memory back, whatever waits for their gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import nn

from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.fsdp2 import small_parts
from tests.multirank import models

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Answer:
    """Of a user's own, in which no tensor is found."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(self.layer(x))


def in_buckets() -> nn.Module:
    """The root reduces its embedding and its head apart."""
    model = models.TinyModel()
    for block in model.blocks:
        fully_shard(block, mp_policy=HALF)
    fully_shard(model, mp_policy=HALF)
    models.loss_of(model, models.batch(0)).backward()
    return model


def summed_in_place() -> nn.Module:
    model = fully_shard(nn.Linear(8, 8), mp_policy=HALF)
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(torch.ones(2, 8)).float().sum().backward()
    return model


def answering() -> nn.Module:
    model = fully_shard(Answering())
    model(torch.ones(2, 8)).value.sum().backward()
    return model


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "in buckets": in_buckets,
    "summed in place": summed_in_place,
    "answering": answering,
}


@on_ranks(2)
@pytest.mark.parametrize("name", TRAINED)
def test_a_model_that_nobody_has_is_freed(name: str) -> None:
    with small_parts(1):
        model = TRAINED[name]()
    parameters = [ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not [parameter for parameter in parameters if parameter() is not None]
