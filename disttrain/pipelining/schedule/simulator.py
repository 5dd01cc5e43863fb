"""Plays a schedule against a clock, with each rank's compute, each direction of each link, and each rank's collectives
as resources of their own.

Every resource takes its work in a known order: a rank computes as listed, a link carries messages as they were sent. So
what starts next starts when the resource is free and all it waits for has ended. Sends and receives only post; whoever
computes with what arrives waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.player import Link, Player
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedule.timeline import Span, Timeline, Transfer


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Plays the schedule, and returns when everything happens.

    Raises: ScheduleError when the schedule does not come to its end, of which `verify` says more, or the costs are for
            another number of stages.
    """
    costs = costs or Costs()
    costs.require_stages(schedule.num_stages)
    player = _Timed(schedule, costs)
    player.play()
    for rank, actions in enumerate(schedule.ranks):
        if not player.is_done(rank):
            raise _stuck(schedule, rank, actions[player.positions[rank]])
    return Timeline(
        schedule,
        costs,
        tuple(map(tuple, player.spans)),
        tuple(map(tuple, player.collectives)),
        tuple(sorted(player.transfers, key=lambda each: (each.start_s, each.from_rank, each.to_rank))),
    )


@dataclass
class _Posted:
    """Messages of one link that one of its ends has come to, and when; they have not travelled."""

    sends: deque[tuple[Action, float]] = field(default_factory=deque)
    receives: deque[tuple[Action, float]] = field(default_factory=deque)


class _Timed(Player):
    """Writes down when everything happens."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        super().__init__(schedule, costs)
        self.spans: list[list[Span]] = [[] for _ in schedule.ranks]
        self.collectives: list[list[Span]] = [[] for _ in schedule.ranks]
        self.transfers: list[Transfer] = []
        self._posted: dict[Link, _Posted] = {}
        self._unsharded_s: dict[int, float] = {}

    def step(self, rank: int, action: Action) -> bool:
        if action.op is Op.UNSHARD or action.op is Op.REDUCE_GRAD:
            spans = self.collectives[rank]
            start_s = max(self.free_s[rank], spans[-1].end_s if spans else 0)
            spans.append(Span(action, start_s, start_s + self.costs.of(action)))
            if action.op is Op.UNSHARD:
                self._unsharded_s[action.stage] = spans[-1].end_s
            return True
        return super().step(rank, action)

    def compute(self, rank: int, action: Action, start_s: float) -> None:
        if self._unsharded_s:
            start_s = max(start_s, *(self._unsharded_s.get(part.stage, 0) for part in action.parts))
        super().compute(rank, action, start_s)
        self.spans[rank].append(Span(action, start_s, self.free_s[rank]))

    def send(self, rank: int, send: Action) -> bool:
        link = self.link_of(send)
        posted = self._posted.setdefault(link, _Posted())
        posted.sends.append((send, self.free_s[rank]))
        self._match(link, posted)
        return True

    def receive(self, rank: int, receive: Action) -> None:
        link = self.link_of(receive.other_end)
        posted = self._posted.setdefault(link, _Posted())
        posted.receives.append((receive, self.free_s[rank]))
        self._match(link, posted)

    def _match(self, link: Link, posted: _Posted) -> None:
        """Sends the messages that both ends have reached."""
        while posted.sends and posted.receives:
            send, ready_s = posted.sends.popleft()
            receive, posted_s = posted.receives.popleft()
            if send.other_end != receive:
                raise _crossed(self.schedule, link, send, receive)
            self.transfer(send, link, ready_s, posted_s)

    def transfer(self, send: Action, link: Link, ready_s: float, posted_s: float = 0) -> float:
        start_s = super().transfer(send, link, max(ready_s, posted_s))
        self.transfers.append(Transfer(send, *link, ready_s, start_s, self.link_free_s[link]))
        return start_s


def _stuck(schedule: Schedule, rank: int, action: Action) -> ScheduleError:
    return ScheduleError(
        "pipelining.simulate",
        f"{schedule.name} does not come to its end: rank {rank} waits for ever at {action}.",
        "Call verify on the schedule, which says why.",
    )


def _crossed(schedule: Schedule, link: Link, send: Action, receive: Action) -> ScheduleError:
    return ScheduleError(
        "pipelining.simulate",
        f"{schedule.name} crosses messages from rank {link[0]} to {link[1]}: {send} meets {receive}.",
        "Call verify on the schedule, which says where.",
    )
