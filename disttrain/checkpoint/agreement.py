"""The ranks of the default world as an assembly, at the world's store."""

from __future__ import annotations

from disttrain.checkpoint.assembly import Assembly, Codec
from disttrain.process_group import World, current_world, is_initialized
from disttrain.process_group.packing import pack, unpack
from disttrain.store import PrefixStore


class Council(Assembly):
    """The ranks that save or load together: the default world's, or this process `alone`, as where there is none."""

    def __init__(self, operation: str, *, alone: bool = False) -> None:
        self.world: World | None = None if alone or not is_initialized() else current_world(operation)
        rank, size = (0, 1) if self.world is None else (self.world.rank, self.world.world_size)
        store = None if self.world is None else PrefixStore("checkpoint", self.world.store)
        super().__init__(operation, rank, size, store, Codec(pack, unpack))
