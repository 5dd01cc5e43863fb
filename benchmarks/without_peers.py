"""Both libraries' transports without peers, so that only what the host does is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from disttrain.process_group import World, entered_world
from disttrain.store import HashStore


@contextmanager
def without_peers(world_size: int) -> Iterator[None]:
    """This process is rank 0 of `world_size`, for us and for torch; one thread computes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    world = World(HashStore(), 0, world_size, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    with entered_world(world):
        yield
    torch.distributed.destroy_process_group()
