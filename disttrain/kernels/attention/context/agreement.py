"""Lets the ranks of an axis compare what they are about to compute, before anybody waits for keys that nobody sends.

On CPUs they do so at each call, by one number each. On GPUs, where the host would wait, they do so where a rank's call
has not followed its last one before: layers of several rules, and backwards that compute anew, soon have been compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from disttrain import errors
from disttrain.errors import DisttrainError, ShapeError
from disttrain.process_group import ProcessGroup, all_gather_into_tensor, all_gather_object
from disttrain.process_group.watching.refusals import ANY, is_recomputed_enough

NAME: Final = "attention"
_REFUSED: Final = -1
Fields = Mapping[str, str]


class Agreed:
    """Pairs of calls, one behind the other, about which all ranks of a group have agreed."""

    def __init__(self) -> None:
        self._last = _REFUSED
        self._followed: set[tuple[int, int]] = set()
        self.num_calls = 0

    def is_known(self, number: int) -> bool:
        """True if a call of this number has followed the last one before."""
        return (self._last, number) in self._followed

    def add(self, number: int) -> int:
        """All ranks agree that this is the next call; returns how many there are."""
        if len(self._followed) >= _MOST_FOLLOWED:
            self._followed.clear()
        self._followed.add((self._last, number))
        self._last = number
        self.num_calls += 1
        return self.num_calls


_MOST_FOLLOWED: Final = 4096
_AGREED: Final[WeakKeyDictionary[ProcessGroup, Agreed]] = WeakKeyDictionary()


def num_agreed(group: ProcessGroup) -> int:
    """The number of calls about which the ranks of a group have agreed until now."""
    agreed = _AGREED.get(group)
    return 0 if agreed is None else agreed.num_calls


def agree(group: ProcessGroup, device: torch.device, fields: Fields, error: DisttrainError | None) -> int:
    """Goes on if all ranks of the group are about to compute what these fields say.

    Args:    error  this rank's reason not to.
    Returns: the number of calls that they have agreed about until now.
    Raises:  on all ranks: this rank's error, or that of the first rank that has one, or ShapeError that names what is
             not alike.
    Collective: on CPUs, and elsewhere if calls like the last one and this have not followed each other before.
    """
    number = _REFUSED if error is not None else _number_of(fields)
    agreed = _AGREED.get(group) or _AGREED.setdefault(group, Agreed())
    if device.type != "cpu":
        if error is not None:
            # The others may not be comparing.
            group.refuse(NAME, error, ANY)
            raise error
        # What is recorded has been compared when it ran as it is.
        if agreed.is_known(number) or torch.cuda.is_current_stream_capturing():
            return agreed.add(number)
    numbers = torch.empty(group.group_size, dtype=torch.int64, device=device)
    all_gather_into_tensor(numbers, torch.tensor([number], device=device), group)
    if error is None and bool((numbers == number).all()):
        return agreed.add(number)
    answers: list[tuple[dict[str, str], list[str]]] = [({}, [])] * group.group_size
    reason = [] if error is None else [type(error).__name__, error.problem, error.remedy]
    all_gather_object(answers, (dict(fields), reason), group)
    raise error or _answer(group, answers)


def agreeing_backward(
    result: torch.Tensor, group: ProcessGroup, device: torch.device, fields: Fields, number: int
) -> torch.Tensor:
    """The result of a call, whose backward begins as a call does: ranks that differentiate others would take their
    keys for those of this one. On GPUs calls of the same fields are not told apart."""
    if not result.requires_grad:
        return result
    of_call = {"backward": f"of call {number}" if device.type == "cpu" else "of a call"}
    apply: Any = _Agreeing.apply
    same: torch.Tensor = apply(result, lambda: agree(group, device, {**fields, **of_call}, None))
    return same


@contextmanager
def between_exchanges(group: ProcessGroup) -> Iterator[None]:
    """Ends the group where this rank fails within, as for want of memory: the others wait for what it does not send,
    and what it has sent would be taken for another call's. Errors of exchanges are known to the others."""
    try:
        yield
    except DisttrainError:
        raise
    except Exception as error:
        is_recorded = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        # What is recorded has not been sent.
        if not (is_recorded or is_recomputed_enough(error)):
            group.give_up(NAME, error)
        raise


class _Agreeing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, begin: Callable[[], int]) -> torch.Tensor:
        ctx.begin = begin
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.begin()
        return grad, None


def _number_of(fields: Fields) -> int:
    text = repr(sorted(fields.items())).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")


def _answer(group: ProcessGroup, answers: list[tuple[dict[str, str], list[str]]]) -> DisttrainError:
    own_rank = group.world.rank
    for rank, (_, reason) in zip(group.members, answers, strict=True):
        if reason:
            kind, problem, remedy = reason
            error: type[DisttrainError] = getattr(errors, kind, ShapeError)
            return error(NAME, f"on rank {rank}: {problem}", remedy, rank=own_rank)
    differing = []
    # What a call says, and what a backward says, are not the same fields.
    for name in dict.fromkeys(name for fields, _ in answers for name in fields):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, (fields, _) in zip(group.members, answers, strict=True):
            ranks_by_value.setdefault(fields.get(name) or "none", []).append(rank)
        if len(ranks_by_value) > 1:
            said = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            differing.append(f"{name}: {said}")
    problem = f"the ranks of the axis call it differently: {'; '.join(differing)}."
    return ShapeError(NAME, problem, "Give all ranks the same but for their own positions.", rank=own_rank)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
