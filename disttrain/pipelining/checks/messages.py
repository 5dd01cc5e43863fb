"""Every output that another rank needs is sent once and received once, and the two ranks of each pair list all messages
between them, either way, in the same order: NCCL does them in the order in which each rank asks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import MESSAGES, Action, Op
from disttrain.pipelining.schedule.dependencies import sends_of
from disttrain.pipelining.schedule.schedule import Schedule


def check_messages(schedule: Schedule) -> Iterator[Problem]:
    if not schedule.has_messages:
        return
    yield from list(_once_each(schedule)) or _same_order(schedule)


def messages_needed(schedule: Schedule) -> Iterator[Action]:
    """The sends of a complete schedule."""
    computed = (Op.FORWARD, Op.BACKWARD_INPUT) if schedule.has_backward else (Op.FORWARD,)
    for stage, microbatch, op in product(range(schedule.num_stages), range(schedule.num_microbatches), computed):
        yield from sends_of(schedule, Action(op, stage, microbatch))
    if schedule.has_backward:
        for stage, peer in schedule.wiring.tied_pairs:
            if schedule.placement.ranks[stage] != schedule.placement.ranks[peer]:
                yield Action(Op.SEND_TIED, stage, None, peer)


def _once_each(schedule: Schedule) -> Iterator[Problem]:
    """Yields messages that are missing or there twice. Needless ones have been refused before: both ends are wired."""
    seen = Counter(action for actions in schedule.ranks for action in actions if action.op in MESSAGES)
    for send in messages_needed(schedule):
        for end in (send, send.other_end):
            if seen[end] != 1:
                text = f"{end} is there {seen[end]} times." if seen[end] else f"{end} is missing."
                yield Problem(text, "Each message needs one send and one receive.", schedule.placement.ranks[end.stage])


def _same_order(schedule: Schedule) -> Iterator[Problem]:
    """Yields the first difference between the lists of each pair of ranks."""
    lists: defaultdict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    home = schedule.placement.ranks
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if action.op in MESSAGES and action.peer is not None:
                lists[rank, home[action.peer]].append((position, action))
    for (rank, peer), messages in lists.items():
        if rank > peer:
            continue
        for (position, message), (_, other) in zip(messages, lists[peer, rank], strict=True):
            if message.other_end != other:
                yield Problem(
                    f"{message} is rank {rank}'s next message with rank {peer}, which has {other} instead of "
                    f"{message.other_end}.",
                    "List the messages of a pair in the same order on both.",
                    rank,
                    position,
                )
                break
