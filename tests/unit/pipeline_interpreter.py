"""A second opinion on pipeline schedules: executes them in the plainest way, one action of a random rank at a time, and
says whether all went well. Shares nothing with the checks that it judges but the actions' fields."""

from __future__ import annotations

import random
from collections import Counter

from disttrain.pipelining import Action, Schedule

ONCE_PER_STEP = {"UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_TIED", "RECV_TIED"}


class Wrong(Exception):
    """The schedule has done something that it must not."""


def is_right(schedule: Schedule, seed: int = 0) -> bool:
    try:
        _Interpreter(schedule, random.Random(seed)).run()
    except Wrong:
        return False
    return True


class _Interpreter:
    def __init__(self, schedule: Schedule, chance: random.Random) -> None:
        self.home = schedule.placement.ranks
        self.num_microbatches = schedule.num_microbatches
        self.has_backward = schedule.has_backward
        self.chance = chance
        self.lists = [list(actions) for actions in schedule.ranks]
        self.kinds = {action.op.value for actions in schedule.ranks for action in actions}
        self.has_messages = any(kind.startswith(("SEND", "RECV")) for kind in self.kinds)
        last = len(self.home) - 1
        self.edges = {(stage, stage + 1) for stage in range(last)} | set(schedule.wiring.skips)
        self.ties = {(a, b) for tie in schedule.wiring.ties for a in tie for b in tie if a != b}
        self.results: Counter[tuple[str, int, int | None]] = Counter()
        self.posted: dict[tuple[int, int], list[str]] = {}
        self.number: dict[tuple[int, str], int] = {}
        self.finished_sends: set[tuple[int, str]] = set()
        self.whole: set[int] = set()
        self.reduced: Counter[int] = Counter()

    def run(self) -> None:
        while waiting := [rank for rank, actions in enumerate(self.lists) if actions]:
            self.chance.shuffle(waiting)
            if not sum(map(self._try, waiting)):
                raise Wrong("deadlock")
        self._judge_end()

    def _try(self, rank: int) -> bool:
        action = self.lists[rank][0]
        parts = action.children or (action,)
        if sum(self._may(rank, part) for part in parts) < len(parts):
            return False
        for part in parts:
            self._do(part)
        self.lists[rank].pop(0)
        return True

    def _may(self, rank: int, part: Action) -> bool:
        kind, stage, microbatch = part.op.value, part.stage, part.microbatch
        if not 0 <= stage < len(self.home) or self.home[stage] != rank:
            raise Wrong("stage")
        if (microbatch is None) != (kind in ONCE_PER_STEP):
            raise Wrong("microbatch")
        if microbatch is not None and not 0 <= microbatch < self.num_microbatches:
            raise Wrong("microbatch")
        if kind.startswith(("SEND", "RECV")):
            return self._may_message(rank, part)
        if part.peer is not None:
            raise Wrong("peer")
        if kind in "FIWB":
            if self.kinds & {"UNSHARD", "RESHARD"} and stage not in self.whole:
                raise Wrong("sharded")
            return self._has_inputs(rank, part)
        return True

    def _has_inputs(self, rank: int, part: Action) -> bool:
        kind, stage, microbatch = part.op.value, part.stage, part.microbatch
        if kind == "W":
            return self.results["I", stage, microbatch] > 0
        if kind != "F" and not self.results["F", stage, microbatch]:
            return False
        for a, b in self.edges:
            mine, other = (b, a) if kind == "F" else (a, b)
            if mine != stage:
                continue
            if self.home[other] == rank or not self.has_messages:
                if not self.results["F" if kind == "F" else "I", other, microbatch]:
                    return False
                continue
            name = f"{'F' if kind == 'F' else 'I'} {other} {stage} {microbatch}"
            if not self._is_through(rank, self.home[other], name):
                return False
        return True

    def _may_message(self, rank: int, part: Action) -> bool:
        kind, stage, peer = part.op.value, part.stage, part.peer
        sends = kind.startswith("SEND")
        source, target = (stage, peer) if sends else (peer, stage)
        assert source is not None
        assert target is not None
        ways = {"F": self.edges, "B": {(b, a) for a, b in self.edges}, "TIED": self.ties}[kind[5:]]
        if (source, target) not in ways or self.home[source] == self.home[target]:
            raise Wrong("way")
        if sends:
            self._judge_content(kind, stage, part.microbatch)
        name = f"{kind[5:].replace('B', 'I')} {source} {target} {part.microbatch}"
        other = self.home[target if sends else source]
        if (rank, name) not in self.number:
            mine = self.posted.setdefault((rank, other), [])
            self.number[rank, name] = len(mine)
            mine.append(name)
            theirs = self.posted.get((other, rank), [])
            if len(theirs) >= len(mine) and theirs[len(mine) - 1] != name:
                raise Wrong("crossed")
        elif not sends or (rank, name) in self.finished_sends:
            raise Wrong("message twice")
        if sends and not self._is_through(rank, other, name):
            return False
        if sends:
            self.finished_sends.add((rank, name))
        return True

    def _judge_content(self, kind: str, stage: int, microbatch: int | None) -> None:
        if kind == "SEND_TIED":
            complete = sum(self.results["W", stage, one] for one in range(self.num_microbatches))
            if complete < self.num_microbatches or ("REDUCE_GRAD" in self.kinds and not self.reduced[stage]):
                raise Wrong("tied too soon")
        elif not self.results["F" if kind == "SEND_F" else "I", stage, microbatch]:
            raise Wrong("nothing to send")

    def _is_through(self, rank: int, other: int, name: str) -> bool:
        number = self.number.get((rank, name))
        return number is not None and len(self.posted.get((other, rank), ())) > number

    def _do(self, part: Action) -> None:
        kind, stage = part.op.value, part.stage
        if kind == "UNSHARD":
            if stage in self.whole:
                raise Wrong("unsharded twice")
            self.whole.add(stage)
        elif kind == "RESHARD":
            if stage not in self.whole:
                raise Wrong("not unsharded")
            self.whole.remove(stage)
        elif kind == "REDUCE_GRAD":
            if sum(self.results["W", stage, one] for one in range(self.num_microbatches)) < self.num_microbatches:
                raise Wrong("reduced too soon")
            self.reduced[stage] += 1
        elif kind in "FIWB":
            for result in "IW" if kind == "B" else kind:
                self.results[result, stage, part.microbatch] += 1

    def _judge_end(self) -> None:
        for stage in range(len(self.home)):
            for microbatch in range(self.num_microbatches):
                for kind in "FIW":
                    wanted = 1 if kind == "F" or self.has_backward else 0
                    if self.results[kind, stage, microbatch] != wanted:
                        raise Wrong("computed too often, or not")
            if "REDUCE_GRAD" in self.kinds and self.reduced[stage] != 1:
                raise Wrong("reductions")
        if self.whole:
            raise Wrong("still unsharded")
        for (rank, other), mine in self.posted.items():
            if mine != self.posted.get((other, rank)):
                raise Wrong("messages do not match")
        if self.has_messages and len(self.number) != 2 * self._num_messages():
            raise Wrong("messages missing")

    def _num_messages(self) -> int:
        crossing = sum(self.home[a] != self.home[b] for a, b in self.edges)
        tied = sum(self.home[a] != self.home[b] for a, b in self.ties) if self.has_backward else 0
        return crossing * self.num_microbatches * (2 if self.has_backward else 1) + tied
