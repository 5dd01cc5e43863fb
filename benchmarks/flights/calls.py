"""The calls of one rank, of which a dump is made: as many as a ring holds, the last of which may hang."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import (
    RECEIVE,
    SEND,
    CallSite,
    ChannelProgress,
    DeviceTimes,
    Failure,
    Frame,
    GroupProgress,
    Record,
    State,
    ThreadStack,
)

NUM_RECORDS = 2000
NUM_FRAMES = 8
NOW_S = 1_700_000_000.0
INSIDE = Frame("/site/disttrain/process_group/door.py", 66, "issue")
Call = tuple[str, tuple[int, ...], str, int | None, int]
"""Group name, its ranks, operation, the peer's rank, and a line."""
Channel = tuple[str, str, int | None]
_ROWS = 8


@dataclass
class Calls:
    """What one rank called. `like`: ranks with an equal one have dumps that differ in their heads only.

    Args: num_open  of the last calls have not ended, where it waits;  error  with which the last has failed;
          rows  of the last call's tensors;  splits  of the last call's rows among the ranks;  works_s  between its
          waits;  is_gone  it left nothing;  form  of what it left: a dump, one that is cut off, or its ring;  reason
          of the dump.
    """

    like: object
    calls: list[Call]
    waits: bool = True
    num_open: int = 1
    is_gone: bool = False
    failure: str = ""
    error: str = ""
    connecting: str = ""
    has_marks: bool = False
    rows: int = _ROWS
    splits: tuple[tuple[int, ...], ...] = ()
    works_s: float = 0.005
    form: str = "dump"
    reason: str = "rank 0 has waited for 20 s"
    at: int = 1
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def dump(self, num_ranks: int) -> Dump:
        """The dump, but for what says which rank it is."""
        outline, sites = self.outline(num_ranks), self._sites
        last: dict[Channel, int] = {}
        records = []
        for number, index in enumerate(self.numbers, 1):
            channel, site = sites[index]
            last[channel] = last.get(channel, 0) + 1
            began_s = NOW_S - (len(self.calls) - number) * 0.01 - 20
            ended_s = began_s + 0.01 - self.works_s
            device = DeviceTimes(began_s + 0.001, began_s + 0.004, None) if self.has_marks else None
            records.append(Record(site, last[channel], State.COMPLETED, began_s, ended_s, device=device))
        if self.waits:
            device = DeviceTimes(NOW_S - 20) if self.has_marks else None
            for index in range(-min(self.num_open, len(records)), 0):
                records[index] = records[index]._replace(state=State.ENQUEUED, completed_s=None, device=device)
        if self.error:
            records[-1] = records[-1]._replace(state=State.FAILED, error=self.error)
        return replace(outline, records=tuple(records))

    def outline(self, num_ranks: int) -> Dump:
        """The dump with one record of each call site: in a ring the first ones, in other files the last ones."""
        sites, numbers = self._sites, self.numbers
        last: dict[Channel, int] = {}
        for index, num_calls in Counter(numbers).items():
            last[sites[index][0]] = last.get(sites[index][0], 0) + num_calls
        order = [*dict.fromkeys(numbers)] if self.form == "ring" else [*dict.fromkeys(numbers[::-1])][::-1]
        is_inside = self.waits or self.connecting
        frame = Frame("/job/model.py", self.at, "layer")
        groups = self.groups | {site.group_name: site.ranks for _, site in sites}
        return Dump(
            rank=0,
            world_size=num_ranks,
            job="job",
            host="",
            pid=0,
            started_s=NOW_S - 100,
            dumped_s=NOW_S,
            reason="exception" if self.failure else self.reason,
            versions={},
            package="/site/disttrain/",
            libraries=("/site/",),
            failure=Failure("ValueError", self.failure, (frame,)) if self.failure else None,
            groups=tuple(
                GroupProgress(
                    name,
                    ranks,
                    last.get((name, "", None), 0),
                    "",
                    self.connecting if (name, "", None) not in last else "",
                )
                for name, ranks in groups.items()
            ),
            channels=tuple(ChannelProgress(*key[:2], key[2] or 0, number) for key, number in last.items() if key[1]),
            threads=(ThreadStack("MainThread", True, (INSIDE, frame) if is_inside else (frame,)),),
            records=tuple(Record(sites[index][1], 1, State.COMPLETED, NOW_S, NOW_S) for index in order),
        )

    @property
    def pattern(self) -> object:
        """What the records depend on besides the outline: ranks with an equal one have the same records of other
        groups and peers."""
        channels = [channel for channel, _ in self._sites]
        alike = tuple(map(channels.index, channels))
        lines = tuple(site.stack[0].line for _, site in self._sites)
        last = self.waits, self.num_open, self.error, bool(self.failure)
        return self.form, tuple(self.numbers), alike, lines, self.has_marks, self.works_s, last

    @cached_property
    def numbers(self) -> list[int]:
        """Of each call the number of its site."""
        # Calls are few tuples, each many times.
        few = dict(zip(map(id, self.calls), self.calls, strict=True))
        kinds = {address: (call[0], *call[2:]) for address, call in few.items()}
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds.values()))}
        number_of = {address: numbers[kind] for address, kind in kinds.items()}
        found = [*map(number_of.__getitem__, map(id, self.calls))]
        if found and (self.splits or self.rows != _ROWS):
            found[-1] = len(numbers)
        return found

    @cached_property
    def _sites(self) -> list[tuple[Channel, CallSite]]:
        """By its number each call site, with what its calls are counted in."""
        sites: dict[int, tuple[Channel, CallSite]] = {}
        for number, (name, ranks, operation, peer, line) in dict(zip(self.numbers, self.calls, strict=True)).items():
            is_odd = number == self.numbers[-1] and (self.splits or self.rows != _ROWS)
            rows, splits = (self.rows, self.splits) if is_odd else (_ROWS, ())
            stack = tuple(Frame("/job/model.py", line + depth, f"layer_{depth}") for depth in range(NUM_FRAMES))
            shapes = ((rows, line),)
            site = CallSite(name, ranks, operation, shapes, shapes, ("bfloat16",), peer, stack, splits=splits)
            sites[number] = (name, operation, peer) if operation in (SEND, RECEIVE) else (name, "", None), site
        # A number may be left out: the last call may be the only one of its kind, and have rows of its own.
        return [sites.get(number) or next(iter(sites.values())) for number in range(max(sites, default=-1) + 1)]


def loop(num_ranks: int, num_records: int = NUM_RECORDS) -> list[Call]:
    """A full ring of one rank: a loop over 40 call sites, in three groups of all."""
    ranks = tuple(range(num_ranks))
    operations = ("all_gather_into_tensor", "all_reduce")
    sites = [(f"group {line % 3}", ranks, operations[line % 2], None, 10 * line) for line in range(40)]
    return [sites[number % 40] for number in range(num_records)]
