"""A mask of a model of transformers that is not made: what it would have said, as rules.

transformers describes a mask by functions of places, nested in each other, of which it makes a tensor. The places would
be those of this rank's positions alone. Here the functions are read instead, by their names.

Source: transformers, "Attention mask interface" (documentation of 5.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import getclosurevars
from typing import Any, Final, NoReturn

from disttrain.context_parallel.faults import refuse
from disttrain.kernels import Causal, SlidingWindow
from disttrain.kernels.attention.rules import Rule

NAME: Final = "attention of a model of transformers"
WITHOUT: Final = "Train this model without context parallel."
_SAY_NOTHING: Final = ("bidirectional_mask_function", "packed_sequence_mask_function")
"""Packed sequences are found by gaps in positions, which are those of the cut; documents come by `cut_batch`."""


class UnmadeMask:
    """Goes through a model in a mask's place. Attention of ours takes its `rules`; all else is refused: a model that
    adds its mask to scores has only those of this rank's keys."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_use()

    def __getitem__(self, index: object) -> Any:
        _refuse_use()

    def __add__(self, other: object) -> Any:
        _refuse_use()

    def __lt__(self, other: object) -> Any:
        _refuse_use()

    __radd__ = __rsub__ = __rmul__ = __mul__ = __and__ = __rand__ = __gt__ = __add__

    def __invert__(self) -> Any:
        _refuse_use()


def _refuse_use() -> NoReturn:
    problem = "it computes with a mask, so with scores of its own, which are those of this rank's keys alone."
    refuse(NAME, problem, WITHOUT)


def rules_of(function: Callable[..., Any]) -> Iterator[Rule]:
    """The rules that a mask's function stands for. Refuses those for which there is none."""
    name = function.__qualname__.partition(".")[0]
    within = getclosurevars(function).nonlocals
    if name == "causal_mask_function":
        yield Causal()
    elif name == "sliding_window_overlay":
        yield SlidingWindow(within["sliding_window"])
    elif name == "sliding_window_bidirectional_overlay":
        yield SlidingWindow(within["sliding_window"] + 1)
    elif name == "and_masks":
        for each in within["mask_functions"]:
            yield from rules_of(each)
    elif name == "remap_positions_for_packed_sequence":
        yield from rules_of(within["mask_function"])
    elif name not in _SAY_NOTHING:
        refuse(NAME, f"a layer's mask is of the kind {name}, for which there is no rule.", WITHOUT)
