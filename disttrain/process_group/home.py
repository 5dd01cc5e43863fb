"""The world as its groups know it; `World`, which makes them, stands above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from disttrain.process_group.interfaces import GroupLike
from disttrain.process_group.watching.comparing import Comparing
from disttrain.process_group.watching.observer import ObservedWorld
from disttrain.process_group.watching.refusals import Refusals


class HomeWorld(ObservedWorld, Protocol):
    """The part of a world that its groups and their collectives use; `World` says more of each."""

    device: torch.device
    compares_calls: bool
    comparing: Comparing
    refusals: Refusals

    @property
    def default_group(self) -> GroupLike: ...

    def make_ranks_known(self, tell: Callable[[object], object]) -> None: ...
