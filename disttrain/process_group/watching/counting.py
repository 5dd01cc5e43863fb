"""Counts the operations that a piece of code hands to its transport, by the layer of the library that asks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from disttrain.console import table
from disttrain.process_group.current import current_world

if TYPE_CHECKING:
    from types import FrameType

    from disttrain.errors import DisttrainError
    from disttrain.process_group.watching.observer import Call

OTHER: Final = "other"
"""The layer of what a script calls itself."""
_DTENSOR: Final = "dtensor"
_LAYERS: Final = (
    # The first that a module's name begins with holds.
    ("disttrain.dtensor.rules.loss", "loss"),
    ("disttrain.dtensor.", _DTENSOR),
    ("disttrain.kernels.attention.context.", "attention"),
    ("disttrain.kernels.cross_entropy.", "loss"),
    ("disttrain.kernels.optimizers.total_norm", "norms"),
    ("disttrain.tp.loss.", "loss"),
    ("disttrain.pipelining.runtime.clipping", "norms"),
    ("torch.nn.utils.clip_grad", "norms"),
    ("torch.amp.", "norms"),
    ("disttrain.tp.", "tensor parallel"),
    ("disttrain.fsdp2.", "fully_shard"),
    ("disttrain.pipelining.", "pipeline"),
    ("disttrain.checkpoint.", "checkpoint"),
)
_BEGINNINGS: Final = ("torch.nn.modules.", "torch.autograd.graph")
"""Functions in which a module, or a backward, begins: their callers did not ask for the collectives within."""


@dataclass
class Count:
    """Of one operation of one layer: launches, what they consist of for the network, bytes of this rank's inputs."""

    launches: int = 0
    operations: int = 0
    num_bytes: int = 0

    def add(self, other: Count) -> None:
        self.launches += other.launches
        self.operations += other.operations
        self.num_bytes += other.num_bytes


class count_collectives:  # noqa: N801  it is used as a function is
    """Counts what this rank hands to its transports while it is entered, by layer of the library and by operation.

        with disttrain.count_collectives() as counted:
            step()
        print(counted)                     # a table
        counted.total.operations           # a number; counted.of("norms").operations: of one layer

    Several tensors that are handed over at once, in a list or in a coalescing block, are one launch. For a network they
    are as many operations, each of which has its latency. A message is an operation of who sends it and of who receives
    it. Layers are fully_shard, tensor parallel, pipeline, attention (of positions that are cut), loss, norms (of
    gradients, for clipping or scaling), dtensor, checkpoint, and other: what the script calls itself. What GPUs of one
    host copy to each other without a transport is not counted.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Count] = {}
        """By layer and operation."""

    def __enter__(self) -> Self:
        self.counts.clear()
        self._world = current_world("count_collectives")
        self._world.add_observer(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._world.remove_observer(self)

    @property
    def total(self) -> Count:
        """Of all layers."""
        return self._sum(self.counts)

    def of(self, layer: str) -> Count:
        """Of all operations of a layer."""
        return self._sum(key for key in self.counts if key[0] == layer)

    def _sum(self, keys: Iterator[tuple[str, str]] | dict[tuple[str, str], Count]) -> Count:
        total = Count()
        for key in keys:
            total.add(self.counts[key])
        return total

    def __str__(self) -> str:
        """A table, one operation of a layer per line."""
        rows = [(*key, self.counts[key]) for key in sorted(self.counts)]
        rows.append(("all", "", self.total))
        cells = [
            (layer, operation, f"{count.launches:,}", f"{count.operations:,}", f"{count.num_bytes:,}")
            for layer, operation, count in rows
        ]
        return table(("layer", "operation", "launches", "operations", "bytes"), cells, words=(0, 1))

    def enqueued(self, call: Call) -> None:
        key = (_layer_of(sys._getframe(1)), call.operation)
        count = self.counts.get(key) or self.counts.setdefault(key, Count())
        waiting = call.group.coalesced
        # Operations of a coalescing block are put down once they have been handed over.
        count.launches += waiting is None or not waiting
        count.operations += len(call.inputs) if call.operation.endswith("_coalesced") else 1
        count.num_bytes += sum(tensor.nbytes for tensor in call.inputs)

    def completed(self, call: Call, error: DisttrainError | None) -> None:
        """Nothing more is to be seen then."""


def _layer_of(frame: FrameType | None) -> str:
    """The layer that asks for a call: the innermost on the stack; DTensor only where no other layer uses it."""
    fallback = OTHER
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        layer = next((layer for prefix, layer in _LAYERS if name.startswith(prefix)), None)
        if layer is not None and layer != _DTENSOR:
            return layer
        if layer is not None:
            fallback = layer
        elif not name.startswith(("torch.", "disttrain.")) or name.startswith(_BEGINNINGS):
            break
        frame = frame.f_back
    return fallback
