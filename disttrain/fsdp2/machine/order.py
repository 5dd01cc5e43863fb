"""In which order modules run: learnt in one iteration, used to prefetch in the next. Pure."""

from __future__ import annotations

from collections.abc import Container, Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class ExecutionOrder(Generic[Member]):
    """Records the members of each iteration in turn. As long as an iteration repeats the last one, it says which member
    comes next.

    A prefetch is a collective: all ranks must decide alike. They do, since they run the same program; where one
    iteration leaves the learnt path, prefetching stops for the rest of it.
    """

    def __init__(self) -> None:
        self._learnt: list[Member] = []
        self._now: list[Member] = []
        self._last: dict[Member, int] = {}
        """Where each member has run last."""
        self._on_path = False

    def begin(self) -> None:
        """A new forward pass begins, and is expected to repeat the last one."""
        if self._now:
            self._learnt = self._now
        self._now, self._last = [], {}
        self._on_path = bool(self._learnt)

    def forget_run(self) -> None:
        """The iteration that has begun is as if it had not."""
        self._now, self._last = [], {}
        self._on_path = False

    @property
    def is_over(self) -> bool:
        """True when as many have run as in the last iteration; False while none is known."""
        return 0 < len(self._learnt) <= len(self._now)

    def visit(self, member: Member, mates: Container[Member] = ()) -> Member | None:
        """`member` runs now. Returns who is expected to run after it, and after its `mates`."""
        position = len(self._now)
        self._now.append(member)
        self._last[member] = position
        self._on_path = self._on_path and position < len(self._learnt) and self._learnt[position] == member
        if not self._on_path:
            return None
        for index in range(position + 1, len(self._learnt)):
            if self._learnt[index] not in mates:
                return self._learnt[index]
        return None

    def backward_from(self, member: Member, mates: Container[Member] = ()) -> Member | None:
        """The backward of `member` runs now. Returns whose backward is expected next, but for its `mates`."""
        for index in reversed(range(self._last.get(member, 0))):
            if self._now[index] not in mates:
                return self._now[index]
        return None
