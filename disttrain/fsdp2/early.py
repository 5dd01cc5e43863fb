"""Gradients that are reduced before the backward pass ends: those of a root, part by part, as soon as they are there.

A model's root holds what no block has taken, as a rule the embedding and the head. The head's gradients come first in
backward, the embedding's last; reduced together they would keep the network idle until the end and then the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from disttrain.fsdp2.param import ShardedParam
from disttrain.fsdp2.transfers.forms import early_parts


def parts_by_child(module: nn.Module, params: Sequence[ShardedParam]) -> list[list[ShardedParam]]:
    """The parameters by the children of `module` that hold them, last child first, as backward reaches them."""
    children = {below: place for place, child in enumerate(module.children()) for below in child.modules()}
    places = [min(children.get(owner.module, -1) for owner in param.owners) for param in params]
    parts = early_parts(places, [param.num_bytes for param in params])
    return [[params[place] for place in part] for part in parts]


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
                    # As a plain tensor's: a DTensor's hook may have to wait for the end of the backward.
                    torch.Tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        param.unsharded,
                        lambda _, place=place, param=param: self._tick_off(place, param),
                    )

    def _tick_off(self, place: int, param: ShardedParam) -> None:
        # Recomputation by a backward pass of its own brings a parameter's gradient in several pieces.
        missing = self._missing[place]
        if param in missing:
            missing.remove(param)
            if not missing:
                self._reduce(self._parts[place])
