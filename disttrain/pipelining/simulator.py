"""Plays a schedule against a clock, with each rank's compute, each direction of each link, and each rank's collectives
as resources of their own.

Every resource takes its work in a known order: a rank computes as listed, a link carries messages as they were sent. So
an event needs no queue sorted by time: what starts next starts when the resource is free and all it waits for has
ended. Sends and receives only post; whoever computes with what arrives waits for it. Without messages in the schedule
each output travels as soon as it is there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from disttrain.errors import ScheduleError
from disttrain.pipelining.action import COMPUTE, INPUT_GRADIENTS, RECEIVES, SENDS, Action, Op
from disttrain.pipelining.costs import Costs
from disttrain.pipelining.liveness import peaks
from disttrain.pipelining.schedule import Schedule
from disttrain.pipelining.timeline import Span, Timeline, Transfer

# Something that a computation may wait for: the receive of a message, a computation itself, an unsharding.
_Event = Action


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When everything happens.

    Raises: ScheduleError when the schedule does not come to its end; `verify` says more about the reason.
    """
    run = _Run(schedule, costs or Costs())
    run.play()
    return Timeline(
        schedule,
        tuple(tuple(rank.compute) for rank in run.ranks),
        tuple(tuple(rank.collectives) for rank in run.ranks),
        tuple(sorted(run.transfers, key=lambda transfer: transfer.start_s)),
        peaks(schedule, run.costs),
    )


@dataclass
class _Rank:
    actions: tuple[Action, ...]
    position: int = 0
    free_s: float = 0
    collectives_free_s: float = 0
    compute: list[Span] = field(default_factory=list)
    collectives: list[Span] = field(default_factory=list)


@dataclass
class _Link:
    """One direction: what was posted at either end and has not travelled."""

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
        self.ended: dict[_Event, float] = {}
        self.awaited: dict[_Event, int] = {}
        self.runnable = deque(range(len(self.ranks)))

    def play(self) -> None:
        while self.runnable:
            rank = self.runnable.popleft()
            state = self.ranks[rank]
            while state.position < len(state.actions) and self._step(rank, state, state.actions[state.position]):
                state.position += 1
        for rank, state in enumerate(self.ranks):
            if state.position < len(state.actions):
                raise _stuck(self.schedule, rank, state.actions[state.position])

    def _step(self, rank: int, state: _Rank, action: Action) -> bool:
        """Do the action; False when it waits for something."""
        if action.op in COMPUTE:
            return self._compute(rank, state, action)
        if action.op in SENDS or action.op in RECEIVES:
            self._post(action, state.free_s)
        elif action.op is not Op.RESHARD:
            start_s = max(state.free_s, state.collectives_free_s)
            state.collectives_free_s = self.ended[action] = start_s + self.costs.of(action)
            state.collectives.append(Span(action, start_s, state.collectives_free_s))
        return True

    def _compute(self, rank: int, state: _Rank, action: Action) -> bool:
        start_s = state.free_s
        for part in action.parts:
            for event in self._inputs(part):
                end_s = self.ended.get(event)
                if end_s is None:
                    self.awaited[event] = rank
                    return False
                start_s = max(start_s, end_s)
            start_s = max(start_s, self.ended.get(Action(Op.UNSHARD, part.stage), 0))
        state.free_s = start_s + self.costs.of(action)
        state.compute.append(Span(action, start_s, state.free_s))
        for part in action.parts:
            self._finish(part, state.free_s)
        return True

    def _inputs(self, part: Action) -> list[_Event]:
        """What must have ended before: messages from elsewhere, computations of this rank."""
        stage, microbatch = part.stage, part.microbatch
        if part.op is Op.FORWARD:
            sources = self.schedule.sources[stage]
            return [self._arrival(Op.FORWARD, Op.RECV_F, stage, microbatch, peer) for peer in sources]
        if part.op is Op.BACKWARD_WEIGHT:
            return [Action(Op.BACKWARD_INPUT, stage, microbatch)]
        targets = self.schedule.targets[stage]
        arrivals = [self._arrival(Op.BACKWARD_INPUT, Op.RECV_B, stage, microbatch, peer) for peer in targets]
        return [Action(Op.FORWARD, stage, microbatch), *arrivals]

    def _arrival(self, computed: Op, received: Op, stage: int, microbatch: int | None, peer: int) -> _Event:
        if self.home[stage] == self.home[peer]:
            return Action(computed, peer, microbatch)
        return Action(received, stage, microbatch, peer)

    def _finish(self, part: Action, end_s: float) -> None:
        """A B has ended as an I has; where the schedule has no messages, send what came of it."""
        backward = part.op in INPUT_GRADIENTS
        self.ended[Action(Op.BACKWARD_INPUT, part.stage, part.microbatch) if backward else part] = end_s
        if self.schedule.has_messages or part.op is Op.BACKWARD_WEIGHT:
            return
        others = self.schedule.sources[part.stage] if backward else self.schedule.targets[part.stage]
        for peer in self.schedule.elsewhere(part.stage, others):
            send = Action(Op.SEND_B if backward else Op.SEND_F, part.stage, part.microbatch, peer)
            self._post(send, end_s)
            self._post(send.other_end, end_s)

    def _post(self, message: Action, now_s: float) -> None:
        assert message.peer is not None
        ends = self.home[message.stage], self.home[message.peer]
        way = ends if message.op in SENDS else ends[::-1]
        link = self.links.setdefault(way, _Link())
        (link.sends if message.op in SENDS else link.receives).append((message, now_s))
        while link.sends and link.receives:
            send, ready_s = link.sends.popleft()
            receive, posted_s = link.receives.popleft()
            if send.other_end != receive:
                raise _crossed(self.schedule, way, send, receive)
            start_s = max(ready_s, posted_s, link.free_s)
            link.free_s = self.ended[receive] = start_s + self.costs.transfer_s(send, *way)
            self.transfers.append(Transfer(send, *way, ready_s, start_s, link.free_s))
            if receive in self.awaited:
                self.runnable.append(self.awaited.pop(receive))


def _stuck(schedule: Schedule, rank: int, action: Action) -> ScheduleError:
    return ScheduleError(
        "pipelining.simulate",
        f"{schedule.name} does not come to its end: rank {rank} waits for ever at {action}.",
        "Call verify on the schedule, which says why.",
    )


def _crossed(schedule: Schedule, way: tuple[int, int], send: Action, receive: Action) -> ScheduleError:
    return ScheduleError(
        "pipelining.simulate",
        f"{schedule.name} crosses messages from rank {way[0]} to {way[1]}: {send} meets {receive}.",
        "Call verify on the schedule, which says where.",
    )
