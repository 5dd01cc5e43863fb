"""Plays a schedule against a clock, with each rank's compute, each direction of each link, and each rank's collectives
as resources of their own.

Every resource takes its work in a known order: a rank computes as listed, a link carries messages as they were sent. So
an event needs no queue sorted by time: what starts next starts when the resource is free and all it waits for has
ended. Sends and receives only post; whoever computes with what arrives waits for it. Without messages in the schedule
each output travels as soon as it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.action import COMPUTE, INPUT_GRADIENTS, RECEIVES, SENDS, Action, Op
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.liveness import peaks
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedule.timeline import Span, Timeline, Transfer

# When what one stage computed, or one message brought, was there: by microbatch.
_Times = dict[int | None, float]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When everything happens.

    Raises: ScheduleError when the schedule does not come to its end, of which `verify` says more, or the costs are for
            another number of stages.
    """
    costs = costs or Costs()
    costs.require_stages(schedule.num_stages)
    run = _Run(schedule, costs)
    run.play()
    return Timeline(
        schedule,
        tuple(tuple(rank.compute) for rank in run.ranks),
        tuple(tuple(rank.collectives) for rank in run.ranks),
        tuple(sorted(run.transfers, key=lambda transfer: transfer.start_s)),
        peaks(schedule, costs),
    )


@dataclass
class _Rank:
    actions: tuple[Action, ...]
    position: int = 0
    free_s: float = 0
    collectives_free_s: float = 0
    unsharded_s: dict[int, float] = field(default_factory=dict)
    compute: list[Span] = field(default_factory=list)
    collectives: list[Span] = field(default_factory=list)


@dataclass
class _Link:
    """One direction: what was posted at either end and has not travelled."""

    from_rank: int
    to_rank: int
    sends: deque[tuple[Action, float]] = field(default_factory=deque)
    receives: deque[tuple[Action, float]] = field(default_factory=deque)
    free_s: float = 0


class _Run:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        self.home = schedule.placement.ranks
        self.ranks = [_Rank(actions) for actions in schedule.ranks]
        self.links: dict[tuple[int, int], _Link] = {}
        self.transfers: list[Transfer] = []
        stages = range(schedule.num_stages)
        self.forwards: list[_Times] = [{} for _ in stages]
        self.backwards: list[_Times] = [{} for _ in stages]
        # By kind of send, stage and peer.
        self.arrived: dict[tuple[Op, int, int], _Times] = {}
        self.inputs: dict[Op, list[list[_Times]]] = {
            Op.FORWARD: [self._from(Op.SEND_F, schedule.sources[stage], stage) for stage in stages],
            Op.BACKWARD_INPUT: [
                [self.forwards[stage], *self._from(Op.SEND_B, schedule.targets[stage], stage)] for stage in stages
            ],
            Op.BACKWARD_WEIGHT: [[self.backwards[stage]] for stage in stages],
        }
        self.inputs[Op.BACKWARD] = self.inputs[Op.BACKWARD_INPUT]
        self.sent_to = [tuple(schedule.elsewhere(stage, schedule.targets[stage])) for stage in stages]
        self.sent_back_to = [tuple(schedule.elsewhere(stage, schedule.sources[stage])) for stage in stages]
        self.runnable = deque(range(len(self.ranks)))

    def _from(self, send: Op, others: Iterable[int], stage: int) -> list[_Times]:
        """When what the others compute for `stage` is on its rank."""
        computed = self.forwards if send is Op.SEND_F else self.backwards
        return [
            computed[other]
            if self.home[other] == self.home[stage]
            else self.arrived.setdefault((send, other, stage), {})
            for other in others
        ]

    def play(self) -> None:
        while self.runnable:
            rank = self.ranks[self.runnable.popleft()]
            while rank.position < len(rank.actions) and self._step(rank, rank.actions[rank.position]):
                rank.position += 1
        for number, rank in enumerate(self.ranks):
            if rank.position < len(rank.actions):
                raise _stuck(self.schedule, number, rank.actions[rank.position])

    def _step(self, rank: _Rank, action: Action) -> bool:
        """Do the action; False when it waits for something, whose arrival makes the rank runnable again."""
        if action.op in COMPUTE:
            return self._compute(rank, action)
        if action.op in SENDS:
            link = self._link(action)
            link.sends.append((action, rank.free_s))
            self._carry(link)
        elif action.op in RECEIVES:
            link = self._link(action.other_end)
            link.receives.append((action, rank.free_s))
            self._carry(link)
        elif action.op is not Op.RESHARD:
            start_s = max(rank.free_s, rank.collectives_free_s)
            rank.collectives_free_s = start_s + self.costs.of(action)
            rank.collectives.append(Span(action, start_s, rank.collectives_free_s))
            if action.op is Op.UNSHARD:
                rank.unsharded_s[action.stage] = rank.collectives_free_s
        return True

    def _compute(self, rank: _Rank, action: Action) -> bool:
        start_s = rank.free_s
        for part in action.parts:
            for times in self.inputs[part.op][part.stage]:
                there_s = times.get(part.microbatch)
                if there_s is None:
                    return False
                start_s = max(start_s, there_s)
            start_s = max(start_s, rank.unsharded_s.get(part.stage, 0))
        rank.free_s = start_s + self.costs.of(action)
        rank.compute.append(Span(action, start_s, rank.free_s))
        for part in action.parts:
            self._finish(part, rank.free_s)
        return True

    def _finish(self, part: Action, end_s: float) -> None:
        """Where the schedule has no messages, send what came of it."""
        stage = part.stage
        if part.op is Op.FORWARD:
            self.forwards[stage][part.microbatch] = end_s
            send, peers = Op.SEND_F, self.sent_to[stage]
        elif part.op in INPUT_GRADIENTS:
            self.backwards[stage][part.microbatch] = end_s
            send, peers = Op.SEND_B, self.sent_back_to[stage]
        else:
            return
        for peer in () if self.schedule.has_messages else peers:
            message = Action(send, stage, part.microbatch, peer)
            self._transfer(self._link(message), message, end_s, end_s)

    def _link(self, send: Action) -> _Link:
        assert send.peer is not None
        way = self.home[send.stage], self.home[send.peer]
        return self.links.get(way) or self.links.setdefault(way, _Link(*way))

    def _carry(self, link: _Link) -> None:
        """What has been posted at both ends."""
        while link.sends and link.receives:
            send, ready_s = link.sends.popleft()
            receive, posted_s = link.receives.popleft()
            if send.other_end != receive:
                raise _crossed(self.schedule, link, send, receive)
            self._transfer(link, send, ready_s, posted_s)

    def _transfer(self, link: _Link, send: Action, ready_s: float, posted_s: float) -> None:
        assert send.peer is not None
        start_s = max(ready_s, posted_s, link.free_s)
        link.free_s = start_s + self.costs.transfer_s(send, link.from_rank, link.to_rank)
        self.arrived.setdefault((send.op, send.stage, send.peer), {})[send.microbatch] = link.free_s
        self.transfers.append(Transfer(send, link.from_rank, link.to_rank, ready_s, start_s, link.free_s))
        self.runnable.append(link.to_rank)


def _stuck(schedule: Schedule, rank: int, action: Action) -> ScheduleError:
    return ScheduleError(
        "pipelining.simulate",
        f"{schedule.name} does not come to its end: rank {rank} waits for ever at {action}.",
        "Call verify on the schedule, which says why.",
    )


def _crossed(schedule: Schedule, link: _Link, send: Action, receive: Action) -> ScheduleError:
    return ScheduleError(
        "pipelining.simulate",
        f"{schedule.name} crosses messages from rank {link.from_rank} to {link.to_rank}: {send} meets {receive}.",
        "Call verify on the schedule, which says where.",
    )
