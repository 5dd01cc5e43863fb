"""The calls of one rank, of which a dump is made: as many as a ring holds, the last of which may hang."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass
class Calls:
    """What one rank called. `like`: ranks with an equal one have dumps that differ in their heads only.

    Args: num_open  of the last calls have not ended, where it waits;  error  with which the last has failed;
          rows  of the last call's tensors;  splits  of the last call's rows among the ranks;  works_s  between its
          waits;  is_gone  it left nothing;  form  of what it left: a dump, one that is cut off, or its ring.
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
    rows: int = 8
    splits: tuple[tuple[int, ...], ...] = ()
    works_s: float = 0.005
    form: str = "dump"
    at: int = 1
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def dump(self, num_ranks: int) -> Dump:
        """The dump, but for what says which rank it is."""
        # Without the ranks, which are many to hash: a group's name says them.
        sites: dict[tuple[object, ...], CallSite] = {}
        last: dict[tuple[str, str, int | None], int] = {}
        groups = dict(self.groups)
        records = []
        for number, call in enumerate(self.calls, 1):
            name, ranks, operation, peer, line = call
            is_last = number == len(self.calls)
            key = (name, operation, peer) if operation in (SEND, RECEIVE) else (name, "", None)
            last[key] = last.get(key, 0) + 1
            groups[name] = ranks
            rows, splits = (self.rows, self.splits) if is_last else (8, ())
            called = (name, operation, peer, line, rows)
            if called not in sites:
                stack = tuple(Frame("/job/model.py", line + depth, f"layer_{depth}") for depth in range(NUM_FRAMES))
                shapes = ((rows, line),)
                sites[called] = CallSite(
                    name, ranks, operation, shapes, shapes, ("bfloat16",), peer, stack, splits=splits
                )
            began_s = NOW_S - (len(self.calls) - number) * 0.01 - 20
            ended_s = began_s + 0.01 - self.works_s
            device = DeviceTimes(began_s + 0.001, began_s + 0.004, None) if self.has_marks else None
            records.append(Record(sites[called], last[key], State.COMPLETED, began_s, ended_s, device=device))
        if self.waits:
            device = DeviceTimes(NOW_S - 20) if self.has_marks else None
            for index in range(-min(self.num_open, len(records)), 0):
                records[index] = records[index]._replace(state=State.ENQUEUED, completed_s=None, device=device)
        if self.error:
            records[-1] = records[-1]._replace(state=State.FAILED, error=self.error)
        is_inside = self.waits or self.connecting
        frame = Frame("/job/model.py", self.at, "layer")
        return Dump(
            rank=0,
            world_size=num_ranks,
            job="job",
            host="",
            pid=0,
            started_s=NOW_S - 100,
            dumped_s=NOW_S,
            reason="exception" if self.failure else "rank 0 has waited for 20 s",
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
            records=tuple(records),
        )


def loop(num_ranks: int, num_records: int = NUM_RECORDS) -> list[Call]:
    """A full ring of one rank: a loop over 40 call sites, in three groups of all."""
    ranks = tuple(range(num_ranks))
    operations = ("all_gather_into_tensor", "all_reduce")
    sites = [(f"group {line % 3}", ranks, operations[line % 2], None, 10 * line) for line in range(40)]
    return [sites[number % 40] for number in range(num_records)]
