"""Asks after a failure where the other ranks are.

Each rank whose transports cannot say it has a witness, a thread that answers with how far the rank has come in a group,
what it called there, and where its main thread is. Who came is then known and not guessed, also when the other rank
only computes for too long. It costs nothing until someone asks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from disttrain.errors import StoreError
from disttrain.process_group.watching.comparing import Answer, ask_members, left_text, mismatch
from disttrain.process_group.watching.departures import members_left
from disttrain.store.rank_runs import is_among, to_runs

if TYPE_CHECKING:
    from disttrain.process_group.interfaces import GroupLike

_MAX_NAMED = 8


def absent_text(group: GroupLike, sequence: int, peer_rank: int | None) -> str:
    """`: rank 1 is at sequence 4 (barrier) and now at train.py:9 in load, rank 2 does not answer`.

    Of a message (sequence 0) its other end alone. Empty when that cannot be told. All that wait in a collective time
    out together, and would ask everybody the same: so the first asks, and the others read what it has found.
    """
    witness = group.world.witness
    if witness is None or (not sequence and peer_rank is None):
        return ""
    if not sequence:
        assert peer_rank is not None
        return _found(group, 0, (group.members[peer_rank],))[1]
    rank = group.world.rank
    with suppress(StoreError):
        for attempt in itertools.count():
            name = f"absent/{group.group_name}/{sequence}/{attempt}"
            absent, _, text = witness.once(name, lambda: " ".join(_found(group, sequence, group.ranks))).partition(" ")
            if not is_among(absent, rank):
                return text
            # It came later than that was found out: what was true then is not any more.
    return ""


def _found(group: GroupLike, sequence: int, awaited: Sequence[int]) -> tuple[str, str]:
    """The ranks of `awaited` that have not come, as runs, and the text for all that wait for them."""
    gone = _left(group)
    answers = ask_members(group, sequence, awaited)
    absent = [rank for rank in awaited if rank != group.world.rank and not _has_come(answers.get(rank), sequence)]
    if absent:
        states = [
            left_text({rank: gone[rank]}) if rank in gone else f"rank {rank} {_state(answers.get(rank), sequence)}"
            for rank in absent[:_MAX_NAMED]
        ]
        more = f", and {len(absent) - _MAX_NAMED} more ranks" if len(absent) > _MAX_NAMED else ""
        return to_runs(absent), f": {', '.join(states)}{more}"
    problem = mismatch({rank: said["call"] for rank, said in answers.items()})
    if problem:
        return "", f": all ranks came, but called different things: {problem}"
    return "", ": all ranks came, but not all in time"


def gone_text(group: GroupLike) -> str:
    """`: rank 1 has gone the job after sequence 4`; empty when no member has."""
    gone = _left(group)
    return f": {left_text(gone)}" if gone else ""


def _left(group: GroupLike) -> dict[int, int]:
    with suppress(StoreError):
        return members_left(group)
    return {}


def _has_come(answer: Answer | None, sequence: int) -> bool:
    return answer is not None and 0 < sequence <= answer["come_to"][0]


def _state(answer: Answer | None, sequence: int) -> str:
    if answer is None:
        return "does not answer"
    come_to, operation = answer["come_to"]
    last = f"at sequence {come_to} ({operation})" if come_to else "at no collective of the group yet"
    if not sequence:
        last = "there"
    return f"is {last}{' and now at ' if answer['place'] else ''}{answer['place']}"
