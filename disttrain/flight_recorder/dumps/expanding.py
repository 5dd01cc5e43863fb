"""Puts the operations of replays among those that were called, for all that compares ranks. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Final

from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.columns import Records
from disttrain.flight_recorder.record.record import Record
from disttrain.flight_recorder.record.replays import records_of

_MAX_EXPANDED: Final = 10_000
"""Operations of a rank's latest replays; those of earlier ones are as if its ring had lost them."""


def expanded(dump: Dump) -> Dump:
    """The dump with the operations of its latest replays among its records, in the order of their beginnings."""
    records: list[Record] = []
    for replay in reversed(dump.replays):
        if records and len(records) + len(replay.graph.calls) > _MAX_EXPANDED:
            break
        records[:0] = records_of(replay)
    if not records:
        return dump
    ordered = sorted([*dump.records, *records], key=attrgetter("enqueued_s"))
    return replace(dump, records=Records.of(ordered), replays=())
