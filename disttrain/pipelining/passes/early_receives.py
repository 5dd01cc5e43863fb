"""Post receives early enough that messages travel while their receiver computes something else."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.pipelining.schedule.action import COMPUTE, MESSAGES, RECEIVES, Action
from disttrain.pipelining.schedule.schedule import Schedule


def place_receives_early(schedule: Schedule, num_ahead: int = 1, *, by_direction: bool = False) -> Schedule:
    """Each receive moves up past at most `num_ahead` computations, and past no message of the same two ranks, or with
    `by_direction` past no other receive from the same rank: for transports where messages in one direction do not wait
    for those in the other.

    A receive only makes room, so moving it up can hold up nobody; the room is taken for longer, though.
    """
    home = schedule.placement.ranks
    return schedule.with_ranks(
        [_early(home, actions, num_ahead, by_direction=by_direction) for actions in schedule.ranks]
    )


def _early(home: tuple[int, ...], actions: Sequence[Action], num_ahead: int, *, by_direction: bool) -> list[Action]:
    # Before each computation, and after the last one, what is not computed; receives go to an earlier one of these.
    gaps: list[list[Action]] = [[]]
    computations = []
    last_gap: dict[int, int] = {}  # of each peer, where the last message that must not be passed went
    for action in actions:
        if action.op in COMPUTE:
            computations.append(action)
            gaps.append([])
            continue
        gap = len(gaps) - 1
        if action.op in MESSAGES:
            assert action.peer is not None
            peer = home[action.peer]
            if action.op in RECEIVES:
                gap = max(gap - num_ahead, last_gap.get(peer, 0))
            if action.op in RECEIVES or not by_direction:
                last_gap[peer] = gap
        gaps[gap].append(action)
    early = [action for gap, computation in zip(gaps, computations, strict=False) for action in (*gap, computation)]
    return early + gaps[-1]
