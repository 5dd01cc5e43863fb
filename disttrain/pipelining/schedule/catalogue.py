"""The schedules by name: torch's names where it has them, any case, with or without dashes."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from disttrain._python.garbage import uncollected
from disttrain.arguments import arguments_of
from disttrain.errors import ScheduleError
from disttrain.pipelining import schedules
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule


@dataclass(frozen=True)
class ScheduleKind:
    """A kind of schedule, and how to make it. `stages_per_rank` is what it needs, or what it takes when nobody says."""

    name: str
    make: Callable[[int, int, int], Schedule]
    stages_per_rank: int
    any_stages: bool
    aliases: tuple[str, ...] = ()


def _fixed(name: str, make: Callable[[int, int], Schedule], stages_per_rank: int, *aliases: str) -> ScheduleKind:
    return ScheduleKind(
        name,
        lambda ranks, microbatches, _: make(ranks, microbatches),
        stages_per_rank,
        any_stages=False,
        aliases=aliases,
    )


def _forward_only(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    return schedules.forward_only(Placement.loop(num_ranks, stages_per_rank), num_microbatches)


SCHEDULE_KINDS = (
    _fixed("GPipe", schedules.gpipe, 1),
    _fixed("1F1B", schedules.one_f_one_b, 1),
    ScheduleKind("Interleaved1F1B", schedules.interleaved_1f1b, 2, any_stages=True, aliases=("Interleaved",)),
    ScheduleKind("LoopedBFS", schedules.looped_bfs, 2, any_stages=True, aliases=("BFS",)),
    _fixed("ZB-H1", schedules.zb_h1, 1),
    _fixed("ZB-H2", schedules.zb_h2, 1),
    ScheduleKind("InterleavedZeroBubble", schedules.interleaved_zero_bubble, 2, any_stages=True, aliases=("ZB1P",)),
    _fixed("ZBVZeroBubble", schedules.zbv, 2, "ZBV"),
    _fixed("V-Half", schedules.v_half, 2),
    _fixed("V-Min", schedules.v_min, 2),
    _fixed("DualPipeV", schedules.dualpipev, 2),
    ScheduleKind("ForwardOnly", _forward_only, 1, any_stages=True),
)


@arguments_of("pipelining.make_schedule", remedy="Give a schedule's name.")
def find_schedule_kind(name: str) -> ScheduleKind:
    """Raises: ScheduleError with the names there are."""
    by_key = {_key(spelling): kind for kind in SCHEDULE_KINDS for spelling in (kind.name, *kind.aliases)}
    key = _key(name)
    if key in by_key:
        return by_key[key]
    close = difflib.get_close_matches(key, by_key, 1)
    hint = f"Did you mean {by_key[close[0]].name}? " if close else ""
    raise ScheduleError(
        "pipelining.make_schedule",
        f"There is no schedule {name!r}.",
        f"{hint}There are {', '.join(kind.name for kind in SCHEDULE_KINDS)}.",
    )


@arguments_of("pipelining.make_schedule", remedy="Give a schedule's name, and whole numbers.")
@uncollected()
def make_schedule(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The order of computations of the schedule called `name`; `lower` adds the rest.

    Raises: ScheduleError when there is no such schedule, or it cannot be for these counts.
    """
    kind = find_schedule_kind(name)
    if stages_per_rank is None:
        stages_per_rank = kind.stages_per_rank
    elif not kind.any_stages and stages_per_rank != kind.stages_per_rank:
        needs = "1 stage" if kind.stages_per_rank == 1 else f"{kind.stages_per_rank} stages"
        others = ", ".join(other.name for other in SCHEDULE_KINDS if other.any_stages)
        raise ScheduleError(
            kind.name,
            f"stages_per_rank is {stages_per_rank}; it takes exactly {needs} per rank.",
            f"Cut the model into {kind.stages_per_rank * num_ranks} stages for {num_ranks} ranks, or choose one of "
            f"{others}.",
        )
    return kind.make(num_ranks, num_microbatches, stages_per_rank)


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
