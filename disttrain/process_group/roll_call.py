"""After a timeout: where are the others?

Each rank whose transports cannot say it has a witness, a thread that answers with how far the rank has come in each of
its groups. Who came is then known and not guessed, also when the other rank only computes for too long. It costs
nothing until someone asks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disttrain.process_group.group import ProcessGroup

Progress = dict[str, tuple[int, str]]
"""By group: the sequence number of the last collective issued, and its name."""

_ANSWER_S = 2.0
"""How long the others may take to answer."""
_MAX_NAMED = 8


def absent_text(group: ProcessGroup, sequence: int) -> str:
    """`: rank 1 is at sequence 4 (barrier), rank 2 does not answer`; empty when that cannot be told."""
    witness = group.world.witness
    if witness is None or not sequence:
        return ""
    answers: dict[int, Progress] = {
        rank: json.loads(answer) for rank, answer in witness.ask(group.ranks, _ANSWER_S).items()
    }
    absent = []
    for rank in group.ranks:
        if rank not in answers:
            absent.append(f"rank {rank} does not answer")
            continue
        come_to, operation = answers[rank].get(group.group_name, (0, ""))
        if come_to < sequence:
            last = f"at sequence {come_to} ({operation})" if come_to else "at no collective of the group yet"
            absent.append(f"rank {rank} is {last}")
    if not absent:
        return ": all ranks came, but not all in time"
    more = f", and {len(absent) - _MAX_NAMED} more ranks" if len(absent) > _MAX_NAMED else ""
    return f": {', '.join(absent[:_MAX_NAMED])}{more}"
