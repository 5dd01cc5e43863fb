"""The instruction set of pipelines: what one rank does next, as a small value.

Texts are those of torch.distributed.pipelining (`2F0`, `1UNSHARD`, `3SEND_F1`, `(2F4;5B1)OVERLAP_F_B`), so schedules
travel both ways. Where torch has no text, because a message skips stages or carries a tied gradient, the stage on the
other side follows: `0SEND_F2>3` goes to stage 3, `3RECV_F2<0` comes from stage 0.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from disttrain.errors import ScheduleError


class Op(StrEnum):
    """The kinds of actions; the value is torch's text."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    BACKWARD = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    SEND_TIED = "SEND_TIED"
    RECV_TIED = "RECV_TIED"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP = "OVERLAP_F_B"


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD, Op.OVERLAP})
INPUT_GRADIENTS = frozenset({Op.BACKWARD_INPUT, Op.BACKWARD})
WEIGHT_GRADIENTS = frozenset({Op.BACKWARD_WEIGHT, Op.BACKWARD})
SENDS = frozenset({Op.SEND_F, Op.SEND_B, Op.SEND_TIED})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B, Op.RECV_TIED})
MESSAGES = SENDS | RECEIVES
OF_ONE_STAGE = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})  # once for all microbatches
TIED = frozenset({Op.SEND_TIED, Op.RECV_TIED})

OTHER_END = {
    Op.SEND_F: Op.RECV_F,
    Op.RECV_F: Op.SEND_F,
    Op.SEND_B: Op.RECV_B,
    Op.RECV_B: Op.SEND_B,
    Op.SEND_TIED: Op.RECV_TIED,
    Op.RECV_TIED: Op.SEND_TIED,
}
# Where a message goes to, or comes from, when its text does not say.
_NEIGHBOUR = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}
_TEXT = re.compile(r"(\d+)([A-Z_]+?)(\d*)(?:([<>])(\d+))?")


class Action(NamedTuple):
    """One instruction to the rank that holds `stage`.

    Args: stage  global index; of a message, the one at this rank's end;  microbatch  None for what is done once a step;
          peer  the stage at a message's other end;  children  what an OVERLAP runs together, its own stage being -1.
    """

    op: Op
    stage: int
    microbatch: int | None = None
    peer: int | None = None
    children: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.children:
            return f"({';'.join(map(str, self.children))}){self.op.value}"
        text = f"{self.stage}{self.op.value}" + ("" if self.microbatch is None else str(self.microbatch))
        if self.peer is None or self.peer - self.stage == _NEIGHBOUR.get(self.op):
            return text
        return f"{text}{'>' if self.op in SENDS else '<'}{self.peer}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """An OVERLAP's children; of any other action, itself."""
        return self.children or (self,)

    @property
    def other_end(self) -> Action:
        """The receive of this send, or the send of this receive."""
        assert self.peer is not None
        return Action(OTHER_END[self.op], self.peer, self.microbatch, self.stage)


def parse_action(text: str) -> Action:
    """Read back what `str(action)` wrote, or torch.

    Raises: ScheduleError when the text is no action.
    """
    text = text.strip()
    if text.startswith("("):
        return _parse_overlap(text)
    match = _TEXT.fullmatch(text)
    if match is None or match[2] not in _TEXTS or match[2] == Op.OVERLAP:
        raise _unreadable(text)
    op, stage = Op(match[2]), int(match[1])
    microbatch = int(match[3]) if match[3] else None
    if (microbatch is None) != (op in OF_ONE_STAGE or op in TIED):
        raise _unreadable(text)
    return Action(op, stage, microbatch, _peer(text, op, stage, match[4], match[5]))


def _peer(text: str, op: Op, stage: int, direction: str | None, peer: str | None) -> int | None:
    if op not in MESSAGES or peer is None:
        if peer is not None or op in TIED:
            raise _unreadable(text)
        return stage + _NEIGHBOUR[op] if op in _NEIGHBOUR else None
    if direction != (">" if op in SENDS else "<"):
        raise _unreadable(text)
    return int(peer)


def _parse_overlap(text: str) -> Action:
    inner, closed, op = text[1:].partition(")")
    if not closed or op != Op.OVERLAP or not inner.strip():
        raise _unreadable(text)
    return Action(Op.OVERLAP, -1, children=tuple(parse_action(child) for child in inner.split(";")))


def _unreadable(text: str) -> ScheduleError:
    return ScheduleError(
        "pipelining.parse_action",
        f"{text!r} is no action.",
        "Write stage, kind and microbatch, such as 2F0, 1I3, 0SEND_F2, 0SEND_F2>3, 1UNSHARD or (2F4;5B1)OVERLAP_F_B.",
    )


_TEXTS = frozenset(op.value for op in Op)
