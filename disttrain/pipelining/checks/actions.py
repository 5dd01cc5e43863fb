"""Each action by itself: its stage lies on its rank, its microbatch exists, its peer is wired to the stage."""

from __future__ import annotations

from collections.abc import Iterator

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import COMPUTE, MESSAGES, OF_ONE_STAGE, TIED, Action, Op
from disttrain.pipelining.schedule.schedule import Schedule


def check_actions(schedule: Schedule) -> Iterator[Problem]:
    allowed = _Allowed(schedule)
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            wrong = _wrong_overlap(action) if action.children or action.op is Op.OVERLAP else None
            for part in action.parts:
                wrong = wrong or allowed.wrong(rank, part)
            if wrong:
                yield Problem(f"{action}: {wrong[0]}", wrong[1], rank, position)


def _wrong_overlap(action: Action) -> tuple[str, str] | None:
    kinds = {child.op for child in action.children}
    if action.op is Op.OVERLAP:
        if len(action.children) < 2 or not kinds <= COMPUTE - {Op.OVERLAP}:
            return "an OVERLAP runs two or more computations together.", "Give it F, I, W or B as children."
    elif action.children:
        return "only an OVERLAP has children.", "List them one after the other."
    return None


class _Allowed:
    """The actions that a schedule's stages, microbatches and wiring allow."""

    def __init__(self, schedule: Schedule) -> None:
        self.home = schedule.placement.ranks
        self.num_microbatches = schedule.num_microbatches
        forward = {(source, target) for target, sources in enumerate(schedule.sources) for source in sources}
        backward = {(target, source) for source, target in forward}
        tied = set(schedule.wiring.tied_pairs)
        self.ways = {
            Op.SEND_F: forward,
            Op.RECV_F: backward,
            Op.SEND_B: backward,
            Op.RECV_B: forward,
            Op.SEND_TIED: tied,
            Op.RECV_TIED: tied,
        }

        self._known: dict[tuple[int, Op, int, int | None], tuple[str, str] | None] = {}

    def wrong(self, rank: int, part: Action) -> tuple[str, str] | None:
        """Returns the broken rule and a remedy; None where the action is allowed."""
        microbatch = part.microbatch
        if microbatch is None or not 0 <= microbatch < self.num_microbatches:
            return self._wrong(rank, part)
        # What is right for one microbatch is right for all.
        key = rank, part.op, part.stage, part.peer
        if key not in self._known:
            self._known[key] = self._wrong(rank, part)
        return self._known[key]

    def _wrong(self, rank: int, part: Action) -> tuple[str, str] | None:
        if not 0 <= part.stage < len(self.home):
            return f"there are {len(self.home)} stages.", f"Name one from 0 to {len(self.home) - 1}."
        if self.home[part.stage] != rank:
            at_home = self.home[part.stage]
            return f"stage {part.stage} lies on rank {at_home}.", f"Move it to rank {at_home}."
        if part.op in OF_ONE_STAGE or part.op in TIED:
            if part.microbatch is not None:
                return "it is for all microbatches at once.", "Leave the microbatch out."
        elif part.microbatch is None or not 0 <= part.microbatch < self.num_microbatches:
            return (
                f"there are {self.num_microbatches} microbatches.",
                f"Name one from 0 to {self.num_microbatches - 1}.",
            )
        return self._wrong_peer(part)

    def _wrong_peer(self, part: Action) -> tuple[str, str] | None:
        if part.op not in MESSAGES:
            return None if part.peer is None else ("it is no message.", "Leave the peer out.")
        if part.peer is None or (part.stage, part.peer) not in self.ways[part.op]:
            return f"stages {part.stage} and {part.peer} are not wired so.", "Take it out, or add it to the wiring."
        if self.home[part.stage] == self.home[part.peer]:
            return "both stages lie on one rank, which hands it over without a message.", "Take it out."
        return None
