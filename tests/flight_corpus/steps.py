"""What most runs have in common: a few steps of training that need no model."""

from __future__ import annotations

import disttrain
from tests.flight_corpus.tensors import ones


def train(num_steps: int, group: disttrain.ProcessGroup | None = None, size: int = 4) -> None:
    """Steps that end in an all_reduce each."""
    for _ in range(num_steps):
        step(group, size)


def step(group: disttrain.ProcessGroup | None = None, size: int = 4) -> None:
    disttrain.all_reduce(ones(size), group=group)


def group_of(*ranks: int) -> disttrain.ProcessGroup:
    """A group that this rank is in."""
    group = disttrain.new_group(list(ranks))
    assert isinstance(group, disttrain.ProcessGroup)
    return group
