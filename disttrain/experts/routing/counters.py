"""Numbers that a router gathers on its device: how many tokens each expert got, and sums from which means are taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

import torch
from torch import nn

from disttrain.kernels.operators import define
from disttrain.process_group._c10d import is_in_backward

MEANS: Final = ("entropy", "balance_loss", "z_loss")
"""Means over the tokens of a pass, padding too, which are gathered times their number; nan where scores were nan."""
NUM_OTHERS: Final = len(MEANS) + 1
"""The entries behind the experts' tokens in `RouterCounters.counts`: the means, and the number of choices dropped."""


def _add(counts: torch.Tensor, indices: torch.Tensor, one: torch.Tensor, means: torch.Tensor, has_grad: bool) -> None:
    # A forward within a backward is a recomputation under activation checkpointing. Here, when the operator runs: a
    # graph that is run again for a recomputation is the one that was traced for the forward.
    if is_in_backward() or not (has_grad or _is_checkpointed()):
        return
    flat = indices.reshape(-1)
    counts.scatter_add_(0, flat, one.expand(len(flat)))
    first = len(counts) - NUM_OTHERS
    counts[first : first + len(means)].add_(means, alpha=len(indices))


_add_to = define(
    "count_routing(Tensor(a!) counts, Tensor indices, Tensor one, Tensor means, bool has_grad) -> ()",
    _add,
    lambda *args: None,
)


def _is_checkpointed() -> bool:
    """True within the first forward of a reentrant activation checkpoint, torch's or one after it, which records no
    gradients though the step has some."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_qualname == "CheckpointFunction.forward":
            return True
        frame = frame.f_back
    return False


class KeepsDtypes(nn.Module):
    """A module whose own buffers move with it, and keep their dtypes: bf16 could neither count nor add small steps."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KeepsDtypes:
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        self._buffers.update(dict.fromkeys(buffers))
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._buffers.update(buffers)
        for name, buffer in buffers.items():
            # Modules are cast by functions that leave integers as they are.
            whole = torch.int64 if buffer.dtype == torch.float64 else torch.int32
            moved = fn(buffer.view(whole)).view(buffer.dtype)
            self._buffers[name] = moved
            if buffer.is_meta and not moved.is_meta:
                self.reset_buffer(name)
        return self

    def reset_buffer(self, name: str) -> None:
        """Gives a buffer that has come from the meta device its first values."""
        with torch.no_grad():
            self.get_buffer(name).zero_()


class RouterCounters(KeepsDtypes):
    """The counts of one router in training: no part of its state dict.

    Under torch's DistributedDataParallel, which would overwrite it by rank 0's, give broadcast_buffers=False.
    """

    counts: torch.Tensor
    counts_when_read: torch.Tensor
    counts_when_updated: torch.Tensor
    one: torch.Tensor

    def __init__(self, num_experts: int, top_k: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        # Choices of each expert; those of padding; others.
        size = num_experts + 1 + NUM_OTHERS
        for name in ("counts", "counts_when_read", "counts_when_updated"):
            # Whole numbers are exact to 2 ** 53.
            self.register_buffer(name, torch.zeros(size, dtype=torch.float64, device=device), persistent=False)
        self.register_buffer("one", torch.ones((), dtype=torch.float64, device=device), persistent=False)

    def reset_buffer(self, name: str) -> None:
        """See `KeepsDtypes`."""
        self.get_buffer(name).fill_(1.0 if name == "one" else 0.0)

    def reset_buffers(self) -> None:
        """Begins to count anew."""
        for name, _ in self.named_buffers(recurse=False):
            self.reset_buffer(name)

    def add(self, indices: torch.Tensor, means: torch.Tensor, has_grad: bool) -> None:
        """Counts a forward, but not its recomputation, nor a forward without gradients: that is an evaluation.

        Args: indices  (tokens, k) int64, up to num_experts, which stands for padding;  means  the first of MEANS;
              has_grad  gradients are recorded, though perhaps not here.
        """
        if len(indices):
            _add_to(self.counts, indices, self.one, means.detach(), has_grad)

    def add_dropped(self, num_dropped: torch.Tensor) -> None:
        """Counts choices that an expert without room did not take: one number on the counters' device."""
        others = torch.zeros(NUM_OTHERS, dtype=torch.float64, device=self.counts.device)
        others[-1] = num_dropped
        # As the means of one token that has no expert.
        nobody = torch.zeros(1, 0, dtype=torch.int64, device=self.counts.device)
        _add_to(self.counts, nobody, self.one, others, torch.is_grad_enabled())

    def since_update(self) -> torch.Tensor:
        """(num_experts,) fp64: tokens of each expert since the bias was last updated; and begins anew."""
        fresh = self.counts - self.counts_when_updated
        self.counts_when_updated.copy_(self.counts)
        return fresh[: self.num_experts]

    def since_read(self) -> torch.Tensor:
        """All numbers since they were last read, on the device; and begins anew."""
        fresh = self.counts - self.counts_when_read
        self.counts.nan_to_num_(0.0)
        self.counts_when_read.copy_(self.counts)
        return fresh
