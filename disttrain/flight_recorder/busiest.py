"""A job of messages, such as a pipeline, that waits for one rank. Pure and torch-free.

There ranks wait also where none is late: until the first microbatch comes, and for the last one's gradients. What tells
a slow stage is that it works for longer than any other does. The time of a rank is cut where one of its operations
begins or ends. It has waited where it went on because one had ended; it has worked where it then began one, or took a
message that had been there before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from disttrain.flight_recorder.match import Match, message_key
from disttrain.flight_recorder.record import RECEIVE, Record
from disttrain.flight_recorder.verdict import Kind, Verdict

_MIN_MESSAGES: Final = 8
_MIN_MORE_S: Final = 1.0
"""That it works for longer than any other; less may be the machine's doing."""
_MIN_SHARE: Final = 0.2
"""Of the recorded time."""
_NUM_PAUSES: Final = 2
"""That any rank may make, for a save or a connection, and be no straggler."""


def find_busiest(found: Match) -> list[Verdict]:
    """At most one verdict: of the rank that works for a fifth of the time longer than any other, and a second at
    least."""
    num_taken = sum(message.receive is not None and message.send is not None for message in found.messages.values())
    if num_taken < _MIN_MESSAGES or len(found.dumps) < found.world_size or found.world_size < 2:
        return []
    spans_s, work_s = {}, {}
    for rank in found.dumps:
        parts = list(_parts(found, rank))
        spans_s[rank] = sum(part_s for part_s, _ in parts)
        work_s[rank] = sum(sorted(part_s for part_s, is_work in parts if is_work)[:-_NUM_PAUSES])
    *_, second, rank = sorted(work_s, key=work_s.__getitem__)
    more_s, span_s = work_s[rank] - work_s[second], max(spans_s.values())
    if more_s < _MIN_MORE_S or more_s < _MIN_SHARE * span_s:
        return []
    summary = (
        f"The job moves, but waits for rank {rank}, which works {more_s / span_s:.0%} of the time longer than any "
    )
    summary += "other."
    others = ", ".join(f"rank {other} {time_s:.2f} s" for other, time_s in sorted(work_s.items())[:8])
    evidence = (
        f"outside its operations, without its {_NUM_PAUSES} longest pauses, of {span_s:.2f} s on record: {others}"
    )
    return [Verdict(Kind.STRAGGLER, (rank,), summary, (evidence,))]


def _parts(found: Match, rank: int) -> Iterator[tuple[float, bool]]:
    """Seconds between a beginning or an end of the rank's operations and the next, and whether it has worked then."""
    events: list[tuple[float, float]] = []
    for record in found.dumps[rank].records:
        began_s, ended_s = record.times_s
        events.append((began_s, -math.inf))
        if ended_s is not None:
            events.append((ended_s, _there_s(found, rank, record)))
    for (since_s, _), (until_s, there_s) in pairwise(sorted(events)):
        yield until_s - since_s, there_s <= since_s


def _there_s(found: Match, rank: int, record: Record) -> float:
    """When a message that it has received was sent, by this rank's clock. All else ends when it ends."""
    if record.site.operation != RECEIVE:
        return math.inf
    message = found.messages[message_key(rank, record)]
    if message.send is None:
        return math.inf
    offsets_s = (found.dumps[one].clock_offset_s or 0.0 for one in (message.src_rank, rank))
    return message.send.times_s[0] + next(offsets_s) - next(offsets_s)
