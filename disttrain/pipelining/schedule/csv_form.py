"""Schedules as CSV, torch.distributed.pipelining's form: one row per rank, one cell per action, empty ones for idling.

What the rows don't say is worked out of them: placement, number of microbatches, skip edges and ties.
"""

from __future__ import annotations

import csv
import io
import itertools

from disttrain.arguments import arguments_of
from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.action import (
    INPUT_GRADIENTS,
    MESSAGES,
    TIED,
    WEIGHT_GRADIENTS,
    Action,
    Op,
    parse_action,
)
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule, Wiring


def to_csv(schedule: Schedule) -> str:
    """One row per rank."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(str, actions) for actions in schedule.ranks)
    return text.getvalue()


@arguments_of("pipelining.from_csv", remedy="Give the text of a schedule.")
def from_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule that the rows describe; `verify` says whether it is right.

    Raises: ScheduleError naming rank and cell when a cell is no action, or when no rank can be found for a stage.
    """
    try:
        cells = list(csv.reader(io.StringIO(text.strip("\r\n"))))
    except csv.Error as error:
        raise ScheduleError("pipelining.from_csv", f"This is no CSV: {error}.", "Give rows of cells.") from None
    rows = [_read_row(rank, row) for rank, row in enumerate(cells)]
    parts = [(rank, part) for rank, row in enumerate(rows) for action in row for part in action.parts]
    microbatches = [part.microbatch for _, part in parts if part.microbatch is not None]
    backward = any(part.op in INPUT_GRADIENTS | WEIGHT_GRADIENTS for _, part in parts)
    placement = _placement(parts, len(rows))
    return Schedule(
        name, placement, max(microbatches, default=-1) + 1, tuple(map(tuple, rows)), _wiring(parts), backward
    )


def _read_row(rank: int, row: list[str]) -> list[Action]:
    actions = []
    for cell, text in enumerate(row):
        if not text.strip():
            continue
        try:
            actions.append(parse_action(text))
        except ScheduleError as error:
            where = f"row {rank}, cell {cell}"
            raise ScheduleError("pipelining.from_csv", error.problem, error.remedy, where=where) from None
    return actions


def _placement(parts: list[tuple[int, Action]], num_ranks: int) -> Placement:
    """Each stage lies where its first forward is."""
    homes: dict[int, int] = {}
    for rank, part in parts:
        if part.op is Op.FORWARD:
            homes.setdefault(part.stage, rank)
    absent = next(stage for stage in itertools.count() if stage not in homes)
    idle = [rank for rank in range(num_ranks) if rank not in homes.values()]
    if absent <= max(homes, default=0) or idle:
        subject = f"Rank {idle[0]}" if idle else f"Stage {absent}"
        raise ScheduleError(
            "pipelining.from_csv",
            f"{subject} has no forward.",
            "Give every stage from 0 on its forwards, and every row those of one stage at least.",
        )
    return Placement(tuple(homes[stage] for stage in range(len(homes))))


def _wiring(parts: list[tuple[int, Action]]) -> Wiring:
    messages = [(part, part.peer) for _, part in parts if part.op in MESSAGES and part.peer is not None]
    ends = {(part.stage, peer) for part, peer in messages if part.op not in TIED}
    skips = {(min(pair), max(pair)) for pair in ends if abs(pair[0] - pair[1]) > 1}
    ties = {(min(part.stage, peer), max(part.stage, peer)) for part, peer in messages if part.op in TIED}
    return Wiring(tuple(sorted(skips)), tuple(sorted(ties)))
