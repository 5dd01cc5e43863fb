"""Pairs of a sharded model and the same one whole, trained on a rank's rows and on all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.fsdp2 import fully_shard
from disttrain.fsdp2.transfers import forms
from disttrain.process_group import Call
from tests.multirank import models

SCATTER = "reduce_scatter_tensor"


class Halved(nn.Linear):
    """Its weight is gathered in bfloat16, with a number of each rank's."""

    def fsdp_gather_hooks(self, name: str) -> Halved | None:
        return self if name == "weight" else None

    def fsdp_pre_all_gather(self, shard: torch.Tensor, *_: object) -> tuple[tuple[torch.Tensor, ...], None]:
        return (shard.bfloat16(), shard.new_ones(1)), None

    def fsdp_post_all_gather(
        self, shard: torch.Tensor, outputs: tuple[torch.Tensor, ...], *_: object, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        return None if out is not None else (outputs[0].data, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.bfloat16(), self.weight).to(x.dtype)


def sharded(model: nn.Module, **options: object) -> nn.Module:
    """The model, with a group for each block and one for the rest."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def pair(kind: type[nn.Module] = models.TinyModel, **options: object) -> tuple[nn.Module, nn.Module]:
    """A sharded model and the same one whole."""
    reference = kind().double().init(0)
    return sharded(copy.deepcopy(reference), **options), reference


def own_rows(step: int) -> torch.Tensor:
    return models.own_rows(models.batch(step), disttrain.get_rank(), disttrain.get_world_size())


def backward_of_both(model: nn.Module, reference: nn.Module, step: int) -> None:
    models.loss_of(model, own_rows(step)).backward()
    models.loss_of(reference, models.batch(step)).backward()


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}")


class Calls:
    """The collectives that were called, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def enqueued(self, call: Call) -> None:
        self.names.append(call.operation)

    def completed(self, call: Call, error: Exception | None) -> None:
        """Only the beginning is recorded."""


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The names of the collectives within."""
    world, calls = disttrain.current_world(), Calls()
    world.add_observer(calls)
    try:
        yield calls.names
    finally:
        world.remove_observer(calls)


@contextmanager
def small_parts(num_bytes: int) -> Iterator[None]:
    """Roots reduce parts of their gradients early that have this size."""
    usual, forms.PART_BYTES = forms.PART_BYTES, num_bytes
    try:
        yield
    finally:
        forms.PART_BYTES = usual
