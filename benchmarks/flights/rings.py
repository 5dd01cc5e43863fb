"""Writes the rings that killed ranks leave, of calls that are made up."""

from __future__ import annotations

import itertools
import struct

from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.dumps.words import DUMP_VERSION
from disttrain.flight_recorder.record.process.process_state import GONE
from disttrain.flight_recorder.record.record import Stack, State
from disttrain.flight_recorder.record.ring import layout
from disttrain.ranks import Ranks

_NUM_COUNTERS = 4096
_EPOCH_NS = 10**18


def ring_slots(dump: Dump) -> bytes:
    """The slots, which have all of its records."""
    stacks: dict[int, Stack] = {}
    sites: dict[int, int] = {}
    slots = []
    for number, record in enumerate(dump.records, 1):
        site = record.site
        if id(site) not in sites:
            stacks.setdefault(hash(site.stack), site.stack)
            sites[id(site)] = len(stacks) + len(sites) + 1
        began_ns, ended_ns = (int(at * 1e9) - _EPOCH_NS if at else 0 for at in (record.enqueued_s, record.completed_s))
        failed = int(record.state is State.FAILED)
        called = number, sites[id(site)], 0, record.sequence
        slots.append(layout.SLOT.pack(*called, failed, began_ns, 0, ended_ns, number))
    return b"".join(slots)


def ring_parts(dump: Dump, slots: bytes) -> tuple[bytes, bytes]:
    """What comes before the entry that says which rank it is, and what comes after. `dump`: an outline, whose records
    are the first of each call site."""
    counters = [0] * _NUM_COUNTERS
    entries: list[list[object]] = []
    used = itertools.count(1)

    def counted(number: int) -> int:
        counters[word := next(used)] = number
        return layout.COUNTERS_AT // 8 + word

    for group in dump.groups:
        plain = Ranks.of(group.ranks).plain()
        entries.append(["group", group.group_name, plain, group.axis_name, counted(group.last_sequence)])
    for channel in dump.channels:
        word = counted(channel.last_sequence)
        entries.append(["channel", channel.group_name, channel.operation, channel.peer_rank, word])
    stacks: dict[Stack, int] = {}
    for num_sites, record in enumerate(dump.records):
        site = record.site
        if site.stack not in stacks:
            stacks[site.stack] = len(stacks) + num_sites + 1
            entries.append(["stack", stacks[site.stack], site.stack])
        shapes = site.input_shapes, site.output_shapes
        called = site.group_name, site.operation, *shapes, site.dtypes, site.peer_rank, stacks[site.stack]
        entries.append(["site", len(stacks) + num_sites + 1, *called, site.reduction, site.splits or None])
    head = bytearray(layout.COUNTERS_AT)
    head[: len(layout.MAGIC)] = layout.MAGIC
    num_slots = len(slots) // layout.SLOT.size
    numbers = layout.VERSION, num_slots, _NUM_COUNTERS, layout.entries_at(num_slots, _NUM_COUNTERS)
    layout.LAYOUT.pack_into(head, layout.LAYOUT_AT, *numbers)
    struct.pack_into("@Q", head, layout.ORDER_AT, 1)
    struct.pack_into("@Q", head, layout.ALIVE_AT, int(dump.dumped_s * 1e9) - _EPOCH_NS)
    before = bytes(head) + struct.pack(f"@{_NUM_COUNTERS}Q", *counters) + slots
    return before, b"".join(map(layout.framed, [*entries, ["process", GONE]]))


def header(dump: Dump) -> bytes:
    """The entry that says which rank it is."""
    names = "rank", "world_size", "job", "host", "pid", "started_s", "versions", "package", "libraries"
    fields = {name: getattr(dump, name) for name in names}
    more = {"version": DUMP_VERSION, "process_start": 1, "epoch_ns": _EPOCH_NS, "main_thread": 1}
    return layout.framed(["ring", fields | more])
