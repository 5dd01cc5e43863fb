"""What Gloo's rings do, with one message from each rank straight to each other one, which waits for the network once.

Gloo's own all-gather passes parts on from neighbour to neighbour, and so waits for the network once for each other
rank; its all-reduce, of which torch makes a reduce-scatter, waits twice as often, and sends twice the bytes of a
reduce-scatter (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005,
compare these algorithms). Here ranks exchange by Gloo's all-to-all, whose messages all travel at once, and add up what
they got in the order of ranks: each element alike, wherever it lies.

Copies that are sent to all take memory and time, so that large gathers keep to the ring. So do all-reduces: by a ring
both sides notice where sizes differ, of messages only the side that gets more than it has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from disttrain.process_group._c10d import ReduceOp, Reduction, reduction_kind
from disttrain.process_group.backends.c10d_work import FinishingWork
from disttrain.process_group.backends.reduction import FOLDS

GATHERED_BYTES = 2 * 2**20
"""Of all ranks' parts together: up to here a gather is direct, beyond it a ring that copies less takes less time."""
_NARROW = frozenset({torch.float16, torch.bfloat16})


class DirectWork(FinishingWork):
    """Its last step is done also for who only sees that it has completed, as Gloo's own operations are."""

    __slots__ = ()

    def is_completed(self) -> bool:
        if not super().is_completed():
            return False
        with suppress(RuntimeError):  # the caller's to raise, who waits for it
            self.wait()
        return True


def gathers_directly(part: torch.Tensor, num_ranks: int) -> bool:
    """Alike on all ranks."""
    return part.numel() * part.element_size() * num_ranks <= GATHERED_BYTES


def combine(parts: Sequence[torch.Tensor], op: Reduction, result: torch.Tensor) -> None:
    """Reduce what each rank has sent, tensors like `result`, into it. The first of them may be written to.

    16-bit floats are added up in 32 bits and rounded once. As where C++ writes, autograd does not see it.
    """
    kind = reduction_kind(op)
    fold = FOLDS[kind]
    # So that it may be of either kind, wherever it was made: one of inference, or one that asks for a gradient.
    with torch.inference_mode():
        total = parts[0]
        if total.dtype in _NARROW and fold is torch.add:
            total = total.float()
        for part in parts[1:]:
            fold(total, part, out=total)
        if kind == ReduceOp.AVG:
            total.div_(len(parts))
        result.data.copy_(total)
