"""DualPipeV: DeepSeek's DualPipe cut in half and folded to a V; forwards and backwards of different microbatches run
together (DeepSeek-V3, arXiv:2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe)."""

from __future__ import annotations

from collections import deque

from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.placement import Placement
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.schedules.counts import require_counts, require_microbatches

F, I, W, B = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD  # noqa: E741


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages per rank.

    Raises: ScheduleError when there are fewer microbatches than stages.
    """
    require_counts("DualPipeV", num_ranks, num_microbatches)
    require_microbatches("DualPipeV", num_microbatches, 2 * num_ranks, "it needs one for each stage at least")
    placement = Placement.v(num_ranks)
    ranks = tuple(
        tuple(_Order(rank, *stages).all(num_ranks, num_microbatches)) for rank, stages in enumerate(placement.stages)
    )
    return Schedule("DualPipeV", placement, num_microbatches, ranks)


class _Order:
    """One rank's list while it grows."""

    def __init__(self, rank: int, there: int, back: int) -> None:
        self.rank, self.there, self.back = rank, there, back
        self.actions: list[Action] = []
        self.num_begun = {(op, stage): 0 for op in (F, I) for stage in (there, back)}
        self.pending: deque[Action] = deque()

    def all(self, num_ranks: int, num_microbatches: int) -> list[Action]:
        there, back = self.there, self.back
        behind = num_ranks - 1 - self.rank
        for _ in range(2 * behind):
            self.act(F, there)
        for _ in range(self.rank + 1):
            self.act(F, there)
            self.act(F, back)
        for _ in range(behind):
            self.act(I, back)
            self.weight()
            self.act(F, back)
        for turn in range(num_microbatches - 2 * num_ranks + self.rank + 1):
            if turn == 0 and behind == 0:
                # One after the other here: the backward's input comes from the forward just before.
                self.act(F, there)
                self.act(B, back)
            else:
                self.together(there, back)
            self.together(back, there)
        for _ in range(behind):
            self.act(B, back)
            self.together(back, there)
        self.cool_down(behind)
        return self.actions

    def cool_down(self, behind: int) -> None:
        """From its middle on, backwards leave their W for the gaps at the end."""
        num_whole = self.rank + 1  # of 2 * (rank + 1) backwards
        for turn in range(2 * (self.rank + 1)):
            self.act(B if turn < num_whole else I, self.back if turn % 2 == 0 else self.there)
        for _ in range(behind):
            self.weight()
            self.act(I, self.there)
        while self.pending:
            self.weight()

    def begin(self, op: Op, stage: int) -> Action:
        kind = I if op is B else op
        action = Action(op, stage, self.num_begun[kind, stage])
        self.num_begun[kind, stage] += 1
        return action

    def act(self, op: Op, stage: int) -> None:
        action = self.begin(op, stage)
        self.actions.append(action)
        if op is I:
            self.pending.append(Action(W, stage, action.microbatch))

    def together(self, forward_stage: int, backward_stage: int) -> None:
        children = (self.begin(F, forward_stage), self.begin(B, backward_stage))
        self.actions.append(Action(Op.OVERLAP, -1, children=children))

    def weight(self) -> None:
        if self.pending:
            self.actions.append(self.pending.popleft())
