"""Refuses what attention across ranks cannot serve, on all ranks, also where only one of them was asked for it."""

from __future__ import annotations

from typing import NoReturn

from disttrain.errors import DisttrainError, LayoutError
from disttrain.kernels.attention.context.current import current_cut
from disttrain.process_group.watching.refusals import ANY

RULES = (
    "Leave it out: is_causal=True, and disttrain.kernels.attention's rules for windows, documents and prefixes, which "
    "know the positions of the whole sequence."
)


def refuse(operation: str, problem: str, remedy: str = RULES) -> NoReturn:
    """Raises LayoutError. Ranks that were asked for something else don't wait for this one."""
    cut = current_cut()
    error = LayoutError(operation, problem, remedy, rank=None if cut is None else cut.axis.get_rank())
    if cut is not None and cut.axis.size() > 1:
        try:
            # The others may exchange keys by now: a mask may come from what this rank's positions alone look like.
            cut.axis.get_group().refuse(operation, error, ANY)
        except DisttrainError as reason:
            error.add_note(f"The other ranks could not be told: {reason}")
    raise error


def refuse_mask(operation: str, shape: tuple[int, ...]) -> NoReturn:
    refuse(operation, f"positions are cut over ranks, and the mask of shape {shape} tells of this rank's alone.")


def refuse_dropout(operation: str, probability: float) -> NoReturn:
    problem = f"dropout_p is {probability}, and there is no dropout of attention over positions that are cut."
    refuse(operation, problem, "Give 0.0, as models do in evaluation; for training set the model's own option to 0.")
