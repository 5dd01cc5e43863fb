"""Gradients that are reduced before the backward pass ends: those of a root, part by part, as soon as they are there.

A model's root holds what no block has taken, as a rule the embedding and the head. The head's gradients come first in
backward, the embedding's last; reduced together they would keep the network idle until the end and then the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from disttrain.fsdp2.param import ShardedParam

PART_BYTES = 32 * 2**20
"""What is smaller is not worth a collective of its own, and goes with what comes after it."""


def parts_by_child(module: nn.Module, params: Sequence[ShardedParam]) -> list[list[ShardedParam]]:
    """The parameters by the children of `module` that hold them, last child first, as backward reaches them.

    Children are put together until a part has PART_BYTES.
    """
    children = {below: place for place, child in enumerate(module.children()) for below in child.modules()}
    ordered = sorted(params, key=lambda param: -min(children.get(owner.module, -1) for owner in param.owners))
    parts: list[list[ShardedParam]] = [[]]
    num_bytes, last_child = 0, None
    for param in ordered:
        child = min(children.get(owner.module, -1) for owner in param.owners)
        if num_bytes >= PART_BYTES and child != last_child:
            parts.append([])
            num_bytes = 0
        parts[-1].append(param)
        num_bytes += param.num_bytes
        last_child = child
    return parts


class EarlyParts:
    """Ticks off the gradients of each part, and calls `reduce` with a part when each parameter has had one.

    What comes later, or what a rank's backward pass does not reach, is left to the pass's end. Ranks whose passes reach
    different parameters do not agree on the order of collectives; that is so for blocks, too.
    """

    def __init__(
        self, parts: Sequence[Sequence[ShardedParam]], reduce: Callable[[Sequence[ShardedParam]], None]
    ) -> None:
        self._parts = parts
        self._reduce = reduce
        self._missing: list[set[ShardedParam]] = [set() for _ in parts]

    def begin(self) -> None:
        """A backward pass begins."""
        self._missing = [{param for param in part if param.is_trained} for part in self._parts]

    def watch(self) -> None:
        """Ask to be told of each gradient; once for each whole parameter."""
        for place, part in enumerate(self._parts):
            for param in part:
                if param.unsharded is not None and param.unsharded.requires_grad:
                    param.unsharded.register_post_accumulate_grad_hook(
                        lambda _, place=place, param=param: self._tick_off(place, param)
                    )

    def _tick_off(self, place: int, param: ShardedParam) -> None:
        # Recomputation by a backward pass of its own brings a parameter's gradient in several pieces.
        missing = self._missing[place]
        if param in missing:
            missing.remove(param)
            if not missing:
                self._reduce(self._parts[place])
