"""Both libraries' transports without peers, so that only what the host does is measured; ours as jobs run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import disttrain
from disttrain.process_group import current_world

UNRECORDED = "unrecorded"
"""The side that is ours without the flight recorder."""

Result = TypeVar("Result")


def below(num_frames: int, body: Callable[[], Result]) -> Result:
    """What `body` returns, called below so many more frames."""
    return below(num_frames - 1, body) if num_frames else body()


@contextmanager
def without_peers(world_size: int) -> Iterator[None]:
    """This process is rank 0 of `world_size`, for us and for torch; one thread computes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    disttrain.init_process_group("fake", rank=0, world_size=world_size, device_id=torch.device("cpu"))
    if current_world().recorder is None:
        raise SystemExit("What is measured has the flight recorder on: unset DISTTRAIN_FLIGHT_RECORDER.")
    yield
    disttrain.destroy_process_group()
    torch.distributed.destroy_process_group()


def unrecorded(call: Callable[[], Result]) -> Callable[[], Result]:
    """`call` with the recorder taken off for its time."""

    def run() -> Result:
        world = current_world()
        recorder, world.recorder = world.recorder, None
        try:
            return call()
        finally:
            world.recorder = recorder

    return run
