"""Tells a model which positions of the sequence it has, for rotary angles and the like."""

from __future__ import annotations

import torch

from disttrain.context_parallel.faults import refuse
from disttrain.kernels.attention.context.current import current_cut


def own_positions(max_length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The positions that this rank has of every sequence, as int64; where none is cut, the first `max_length`.

    A model that asks for them needs no argument, and its pipeline no message. In a block with documents they are those
    in the whole sequence all the same.
    Raises: LayoutError, on all ranks, for a sequence of more than `max_length` positions.
    """
    cut = current_cut()
    if cut is None:
        return torch.arange(max_length, device=device)
    if cut.parts.length > max_length:
        problem = f"the sequence has {cut.parts.length} positions, and {max_length} are known."
        refuse("own_positions", problem, "Give shorter sequences, or a larger number.")
    return cut.parts.positions(cut.axis.get_local_rank(), device)
