"""Every output that another rank needs is sent once and received once, and the two ranks of each pair list all messages
between them, either way, in the same order: NCCL does them in the order in which each rank asks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.schedule.action import MESSAGES, OTHER_END, Action, Op
from disttrain.pipelining.schedule.dependencies import sends_of
from disttrain.pipelining.schedule.schedule import Schedule


def check_messages(schedule: Schedule) -> Iterator[Problem]:
    if not schedule.has_messages:
        return
    yield from ([] if _are_once_each(schedule) else list(_once_each(schedule))) or _same_order(schedule)


def messages_needed(schedule: Schedule) -> Iterator[Action]:
    """The sends of a complete schedule."""
    computed = (Op.FORWARD, Op.BACKWARD_INPUT) if schedule.has_backward else (Op.FORWARD,)
    for stage, microbatch, op in product(range(schedule.num_stages), range(schedule.num_microbatches), computed):
        yield from sends_of(schedule, Action(op, stage, microbatch))
    if schedule.has_backward:
        for stage, peer in schedule.wiring.tied_pairs:
            if schedule.placement.ranks[stage] != schedule.placement.ranks[peer]:
                yield Action(Op.SEND_TIED, stage, None, peer)


def _are_once_each(schedule: Schedule) -> bool:
    """True where `_once_each` has nothing to say, found out without a count for each message."""
    sent: defaultdict[tuple[Op, int, int | None], list[int | None]] = defaultdict(list)
    for actions in schedule.ranks:
        for action in actions:
            if action.op in MESSAGES:
                sent[action.op, action.stage, action.peer].append(action.microbatch)
    everything = set(range(schedule.num_microbatches))
    for send in messages_needed(replace(schedule, num_microbatches=1)):
        wanted = {None} if send.microbatch is None else everything
        for end in (send, send.other_end):
            microbatches = sent.get((end.op, end.stage, end.peer), [])
            if len(microbatches) != len(wanted) or set(microbatches) != wanted:
                return False
    return True


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
            if not _are_ends(message, other):
                yield Problem(
                    f"{message} is rank {rank}'s next message with rank {peer}, which has {other} instead of "
                    f"{message.other_end}.",
                    "List the messages of a pair in the same order on both.",
                    rank,
                    position,
                )
                break


def _are_ends(message: Action, other: Action) -> bool:
    """True where `other` is the other end of `message`."""
    op, stage, microbatch, peer, _ = other
    return op is OTHER_END[message.op] and (stage, microbatch, peer) == (
        message.peer,
        message.microbatch,
        message.stage,
    )
