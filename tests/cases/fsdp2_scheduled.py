"""Stages of a small model on one rank, driven by hand through a list of actions as a pipeline would."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.fsdp2 import FSDPModule, fully_shard
from disttrain.pipelining import Backward, split_layers
from disttrain.pipelining.schedule.action import Action, Op, parse_action
from tests.multirank import models

NUM_MICROBATCHES = 4

ONE_F_ONE_B = """0UNSHARD 1UNSHARD 0F0 0F1 1F0 1B0 0B0 0F2 1F1 1B1 0B1 0F3 1F2 1B2 0B2 1F3 1B3 1RESHARD 1REDUCE_GRAD
    0B3 0RESHARD 0REDUCE_GRAD"""

ZERO_BUBBLE = """0UNSHARD 0F0 0F1 1UNSHARD 1F0 1I0 0I0 0F2 1F1 1I1 1W0 0I1 0W0 0RESHARD 0W1 1F2 1I2 1W1 1RESHARD
    0UNSHARD 0I2 0F3 1UNSHARD 1F3 1I3 1W2 1W3 1REDUCE_GRAD 1RESHARD 0W2 0I3 0RESHARD 0W3 0REDUCE_GRAD"""
"""Stages are freed and gathered again in between, and weights get gradients while they are sharded."""


def two_stages(seed: int = 1) -> nn.ModuleList:
    """Embedding, blocks and head, in double precision. Not to be made by several threads at once."""
    torch.manual_seed(seed)
    stages = nn.ModuleList(
        [
            nn.Sequential(nn.Embedding(11, 7), models.Block(7, 13), models.Block(7, 13)),
            nn.Sequential(models.Block(7, 13), nn.Linear(7, 11)),
        ]
    )
    return stages.double()


def shard(stage: nn.Module, *, root: bool = True, blocks: bool = True, **options: object) -> nn.Module:
    """A sharded copy whose layers' backward can be split, with a group for each block and one for the rest."""
    stage = copy.deepcopy(stage)
    split_layers(stage)
    for block in [module for module in stage.modules() if blocks and isinstance(module, models.Block)]:
        fully_shard(block, **options)
    return fully_shard(stage, **options) if root else stage


def outermost(module: nn.Module) -> Iterator[FSDPModule]:
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from outermost(child)


def schedule(*stages: nn.Module) -> None:
    for stage in stages:
        for module in outermost(stage):
            module.set_is_scheduled(True)


class Pipeline:
    """All stages of a pipeline on this rank, and what its microbatches have left so far."""

    def __init__(self, stages: list[nn.Module], tokens: torch.Tensor) -> None:
        self.stages = stages
        self.tokens = tokens.chunk(NUM_MICROBATCHES)
        self._kept: dict[tuple[int, int], tuple[Backward, list[torch.Tensor], torch.Tensor]] = {}
        self._given: dict[tuple[int, int], torch.Tensor] = {}
        self._grads: dict[tuple[int, int], torch.Tensor | None] = {}

    def run(self, text: str) -> None:
        """Do what the actions say."""
        for word in text.split():
            self.do(parse_action(word))

    def finish(self) -> None:
        for stage in self.stages:
            for module in outermost(stage):
                module.finish_grads()

    def do(self, action: Action) -> None:
        if action.microbatch is not None:
            self._compute(action.op, action.stage, action.microbatch)
            return
        for module in outermost(self.stages[action.stage]):
            match action.op:
                case Op.UNSHARD:
                    module.unshard_all()
                case Op.RESHARD:
                    module.reshard_all()
                case Op.REDUCE_GRAD:
                    module.reduce_grads(1 / NUM_MICROBATCHES)

    def _compute(self, op: Op, stage: int, microbatch: int) -> None:
        place = (stage, microbatch)
        is_last = stage == len(self.stages) - 1
        if op is Op.FORWARD:
            given = self.tokens[microbatch] if stage == 0 else self._given[place].detach().requires_grad_()
            backward = Backward()
            with backward.forward():
                output = self.stages[stage](given)
                output = loss(output, self.tokens[microbatch]) if is_last else output
            self._kept[place] = (backward, [given], output)
            self._given[stage + 1, microbatch] = output
            return
        backward, inputs, output = self._kept[place]
        grads = None if is_last else [self._grads[place]]
        match op:
            case Op.BACKWARD:
                found = backward.backward([output], grads, inputs)
            case Op.BACKWARD_INPUT:
                found = backward.backward_input([output], grads, inputs)
            case Op.BACKWARD_WEIGHT:
                backward.backward_weight()
                return
        self._grads[stage - 1, microbatch] = found[0]


def loss(outputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), tokens.flatten())


def own_tokens(step: int = 0) -> torch.Tensor:
    """This rank's rows: the same number for each of 1 to 4 ranks and each microbatch."""
    rows = models.own_rows(all_tokens(step), disttrain.get_rank(), disttrain.get_world_size())
    return rows.to(disttrain.current_world().device)


def all_tokens(step: int = 0) -> torch.Tensor:
    return models.batch(step, rows=12 * NUM_MICROBATCHES)


def backward_of(stages: nn.ModuleList, step: int = 0) -> None:
    """The same step in a single process."""
    x = tokens = all_tokens(step).to(next(stages.parameters()).device)
    for stage in stages:
        x = stage(x)
    loss(x, tokens).backward()


def assert_same_gradients(stages: list[nn.Module], reference: nn.ModuleList) -> None:
    """Each sharded parameter has the gradient of the whole one."""
    expected = dict(reference.named_parameters())
    found = dict(nn.ModuleList(stages).named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        grad = expected[name].grad
        assert (parameter.grad is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(
                parameter.grad.full_tensor(), grad, msg=lambda text, name=name: f"{name}: {text}"
            )
