"""Dumps of ranks that never ran: what each of them called, and where it was when it was dumped."""

from __future__ import annotations

from dataclasses import dataclass, field

from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import (
    CallSite,
    ChannelProgress,
    Failure,
    Frame,
    GroupProgress,
    Record,
    State,
    ThreadStack,
)

PACKAGE = "/site/disttrain/"
IN_WAIT = Frame(f"{PACKAGE}process_group/work.py", 50, "Work.wait")
NOW_S = 1_700_000_000.0


def line(number: int, function: str = "step") -> Frame:
    return Frame("/job/train.py", number, function)


@dataclass
class Rank:
    """One rank of a job; `call` in order, then `dump`."""

    rank: int
    world_size: int = 3
    records: list[Record] = field(default_factory=list)
    last: dict[tuple[str, str, int | None], int] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def call(
        self,
        operation: str,
        at: int = 10,
        group: tuple[int, ...] | None = None,
        shape: tuple[int, ...] = (4,),
        dtype: str = "float32",
        peer: int | None = None,
        state: State = State.COMPLETED,
        took_s: float = 0.001,
        age_s: float = 30.0,
        error: str | None = None,
        reduction: str = "",
        splits: tuple[tuple[int, ...], ...] = (),
    ) -> Rank:
        """Record one more call, `age_s` before the dump."""
        ranks = tuple(range(self.world_size)) if group is None else group
        name = "world" if group is None else "-".join(map(str, group))
        is_message = operation in ("send", "recv")
        key = (name, operation, peer) if is_message else (name, "", None)
        self.last[key] = self.last.get(key, 0) + 1
        self.groups[name] = ranks
        site = CallSite(
            group_name=name,
            ranks=ranks,
            operation=operation,
            input_shapes=(shape,) if operation not in ("barrier", "recv") else (),
            output_shapes=(shape,) if operation not in ("barrier", "send") else (),
            dtypes=(dtype,) if operation != "barrier" else (),
            peer_rank=peer,
            stack=(line(at), line(99, "<module>")),
            reduction=reduction,
            splits=splits,
        )
        enqueued_s = NOW_S - age_s
        completed_s = None if state is State.ENQUEUED else enqueued_s + took_s
        self.records.append(Record(site, self.last[key], state, enqueued_s, completed_s, error))
        return self

    def waits(self, operation: str, at: int = 10, group: tuple[int, ...] | None = None, **more: object) -> Rank:
        """Record a call in which the rank hangs."""
        return self.call(operation, at, group, state=State.ENQUEUED, **more)  # type: ignore[arg-type]

    def dump(self, at: int | None = None, reason: str = "SIGUSR2", failure: Failure | None = None) -> Dump:
        """In Python at line `at`; without it, inside the last call."""
        stack = (line(at, "load"),) if at is not None else (IN_WAIT, *self.records[-1].site.stack)
        return Dump(
            rank=self.rank,
            world_size=self.world_size,
            job="job",
            host="node",
            pid=100 + self.rank,
            started_s=NOW_S - 100,
            dumped_s=NOW_S,
            reason=reason,
            versions={"disttrain": "0.1.0"},
            package=PACKAGE,
            libraries=("/site/",),
            failure=failure,
            groups=tuple(
                GroupProgress(name, self.groups[name], last)
                for (name, _, peer), last in self.last.items()
                if peer is None
            ),
            channels=tuple(
                ChannelProgress(name, operation, peer, last)
                for (name, operation, peer), last in self.last.items()
                if peer is not None and operation
            ),
            threads=(ThreadStack("MainThread", True, stack),),
            records=tuple(self.records),
        )
