"""The pieces of a group's last step, which the next step takes over where nothing but gradients and copies is new.

To take parameters apart needs five times as long as to see that they are as they were, and of a small model the host is
what a step waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, Final

import torch

from disttrain.dtensor import DTensor
from disttrain.dtensor.local_part import local_part, spec_of
from disttrain.dtensor.spec.layout import Layout
from disttrain.dtensor.views.calls import up_to_date
from disttrain.kernels.optimizers.rules import Piece

_END: Final = object()


class LastPieces:
    """What is kept of a group's pieces, some of which may have no elements on this rank: all but gradients and copies,
    whose memory is others' between steps.

    Args: facts  what else they follow from: values that are equal as long as they do.
          state  the optimizer's, by parameter.
    """

    def __init__(
        self, facts: object, state: Mapping[Any, Any], parameters: Sequence[torch.Tensor], pieces: Sequence[Piece]
    ) -> None:
        self.are_of_one_kind = len({(piece.parameter.device, piece.kind) for piece in pieces}) == 1
        self.with_masters = [each for each, piece in zip(parameters, pieces, strict=True) if piece.master is not None]
        self._facts, self._state, self._parameters = facts, state, parameters
        self.states = [state[parameter] for parameter in parameters]
        self._values = [each.values() for each in self.states]
        self._had = [*self._state_tensors()]
        self.written = [*parameters, *(value for value in self._had if isinstance(value, DTensor))]
        """What a step writes to, as far as nobody else counts it."""
        self._layouts = [_layout_of(parameter) for parameter in parameters]
        self._kept = [(piece.parameter, piece.states, piece.master, piece.number) for piece in pieces]
        self._dtypes = [_dtypes_of(piece.parameter, piece.grad, piece.copy) for piece in pieces]

    def are_still(self, facts: object, state: Mapping[Any, Any], parameters: Sequence[torch.Tensor]) -> bool:
        """True if these are the parameters and all that is kept of them."""
        return (
            facts == self._facts
            and state is self._state
            and len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))
            and all(map(is_, map(state.get, parameters), self.states))
            and all(map(is_, self._state_tensors(), self._had))
        )

    def pieces(self, grads: Sequence[torch.Tensor], copy_of: Mapping[int, torch.Tensor]) -> list[Piece] | None:
        """The pieces with these gradients, and the copies that are to be written; None where one is laid out or kept
        otherwise than the last."""
        pieces = []
        zipped = zip(self._parameters, grads, self._kept, self._layouts, self._dtypes, strict=True)
        for parameter, whole, (own, states, master, number), layout, dtypes in zipped:
            if _layout_of(whole) is not layout:
                return None
            local, grad = (parameter, whole) if layout is None else (up_to_date(parameter), local_part(whole))
            copy = copy_of.get(id(parameter))
            if local is not own or _dtypes_of(local, grad, copy) != dtypes:
                return None
            pieces.append(
                Piece(local, grad if grad.is_contiguous() else grad.contiguous(), states, master, number, copy)
            )
        return pieces

    def _state_tensors(self) -> Iterable[Any]:
        # With an end, so that there can't be one more or less.
        return chain(chain.from_iterable(self._values), (_END,))


def _layout_of(tensor: Any) -> Layout | None:
    return spec_of(tensor).layout if isinstance(tensor, DTensor) else None


def _dtypes_of(
    parameter: torch.Tensor, grad: torch.Tensor, copy: torch.Tensor | None
) -> tuple[torch.dtype | None, ...]:
    return parameter.dtype, grad.dtype, None if copy is None else copy.dtype
