"""Rows on their way, as autograd sees them: begun and ended apart, so that others may compute meanwhile.

The backward of an end begins the way back, and the backward of a beginning ends it. So what is computed between the two
in forward has its backward between them too, and a way needs no sizes of its own in backward.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch


class Route(Protocol):
    """Ways of rows between the ranks of an axis, there and back, as often as they are asked for. Collective."""

    ends: torch.Tensor
    """(experts of this rank,) int32 on the device: the first row after each one's. Once rows have begun to come."""

    def agreed(self, asked: int) -> int:
        """The most that a rank's backward pass asks for: the lowest of `asked`; where no host looks, this rank's."""
        ...

    def start(self, rows: torch.Tensor, is_back: bool, *, async_op: bool = True) -> tuple[torch.Tensor, Any]:
        """Begin to send rows that lie as on the sending side. Returns what will hold those that come, and what `finish`
        waits for; without `async_op` that is waited for already, which takes the host less."""
        ...

    def finish(self, coming: torch.Tensor, work: Any, is_back: bool) -> torch.Tensor:
        """The rows that have come, as they lie on the receiving side."""
        ...


class Leg:
    """One way over a route. A tensor without elements stands for the rows while they are under way."""

    __slots__ = ("coming", "is_back", "reverse", "route", "stream", "work")

    def __init__(self, route: Route, is_back: bool) -> None:
        self.route = route
        self.is_back = is_back
        self.coming: torch.Tensor | None = None
        """The memory that rows come into, while they are under way."""
        self.work: Any = None
        self.stream: torch.cuda.Stream | None = None
        """The stream on which it was begun."""
        self.reverse: Leg | None = None
        """The same in backward, once that has begun."""

    def begin(self, rows: torch.Tensor) -> torch.Tensor:
        """Begin to send `rows`. The result is for `end`, which gives the rows that come."""
        under_way: torch.Tensor = _begin(rows, self)
        return under_way

    def end(self, under_way: torch.Tensor) -> torch.Tensor:
        """The rows that have come."""
        rows: torch.Tensor = _end(under_way, self)
        return rows


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, leg: Leg) -> torch.Tensor:
        ctx.leg = leg
        leg.coming, leg.work = leg.route.start(rows, leg.is_back)
        leg.stream = torch.cuda.current_stream(rows.device) if rows.is_cuda else None
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.leg.reverse.end(grad), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, under_way: torch.Tensor, leg: Leg) -> torch.Tensor:
        ctx.leg = leg
        # An activation checkpoint computes again up to the last tensor that was saved. On a rank without experts none
        # need be, and the others would wait for it: so each end saves one.
        ctx.save_for_backward(under_way.new_empty(0))
        coming, work, leg.coming, leg.work = leg.coming, leg.work, None, None
        assert coming is not None
        result = leg.route.finish(coming, work, leg.is_back)
        current = torch.cuda.current_stream(coming.device) if coming.is_cuda else None
        if leg.stream is not None and current is not None and current != leg.stream:
            # Begun on another stream, to which memory goes back as soon as nobody here holds it: of the rows that were
            # sent, and of those that came.
            leg.stream.wait_stream(current)
            coming.record_stream(current)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # Opens what was saved, so that a checkpoint computes it again on all ranks.
        ctx.saved_tensors  # noqa: B018
        leg = ctx.leg
        leg.reverse = Leg(leg.route, not leg.is_back)
        return leg.reverse.begin(grad), None


_begin: Final[Any] = _Begin.apply
_end: Final[Any] = _End.apply
