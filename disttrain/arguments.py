"""Turns errors of Python or torch about an argument of the wrong kind into answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from disttrain.errors import ArgumentError

_REMEDY: Final = (
    "Give what the signature says: tensors, or a list with one for each rank, a ReduceOp, ranks as numbers."
)
_AMBIGUOUS: Final = ("Boolean value of Tensor", "The truth value of an array")


def answer_to(operation: str, error: Exception, rank: int | None, remedy: str = _REMEDY) -> ArgumentError | None:
    """The answer for `error`, raised while arguments of `operation` were looked at; None for errors of other kinds."""
    # Errors of disttrain's are of these kinds, too, and answers already.
    is_ambiguous = type(error) in (RuntimeError, ValueError) and str(error).startswith(_AMBIGUOUS)
    if is_ambiguous or type(error) in (AttributeError, TypeError):
        return ArgumentError(operation, f"an argument is not what belongs there: {error}.", remedy, rank=rank)
    return None


@contextmanager
def arguments_of(operation: str, rank: int | None = None, remedy: str = _REMEDY) -> Iterator[None]:
    """A block that takes the arguments of `operation` apart. Raises ArgumentError for those of the wrong kind."""
    try:
        yield
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        answer = answer_to(operation, TypeError(str(error)) if type(error) is ValueError else error, rank, remedy)
        if answer is not None:
            raise answer from error
        raise
