"""Tells a model which positions of the sequence it has, for rotary angles and the like."""

from __future__ import annotations

import torch

from disttrain.context_parallel.faults import refuse
from disttrain.kernels.attention.context.current import Cut, current_cut
from disttrain.kernels.attention.rules import Documents


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


def positions_in_block(cut: Cut, device: torch.device | str) -> torch.Tensor:
    """This rank's positions as a batch has them, which begin anew in each document: (s,), or (B, s)."""
    ids = cut.within.ids if isinstance(cut.within, Documents) else None
    if ids is None:
        return cut.parts.positions(cut.axis.get_local_rank(), device)
    whole = positions_in_documents(cut.parts.length, ids.to(device), device)
    return cut.parts.take(whole, cut.axis.get_local_rank(), -1)


def positions_in_documents(length: int, ids: torch.Tensor | None, device: torch.device | str) -> torch.Tensor:
    """(S,) or, as the ids are, (B, S): the place of each position of whole sequences in its document."""
    positions = torch.arange(length, device=device)
    if ids is None or not length:
        return positions
    begins = torch.zeros_like(ids, dtype=torch.int64)
    begins[..., 1:] = positions[1:] * (ids[..., 1:] != ids[..., :-1])
    return positions - begins.cummax(-1).values
