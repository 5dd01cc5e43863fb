"""What one step computes on one rank: the same for a model that is whole on each rank and for one in a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import disttrain
from disttrain import kernels, tp
from disttrain.context_parallel import cut_batch
from disttrain.dtensor import DTensor, Shard
from disttrain.experts import set_loss_scale
from disttrain.pipelining import PipelineSchedule, Schedule, clip_grad_norm_, forward_only
from llama.config import LlamaConfig
from llama.meshes import MeshPlan
from llama.parallel import Placed


class Stepper(Protocol):
    """Batches are this rank's rows: (rows, S + 1) int64, inputs and, one further, targets. All ranks call alike."""

    def train(self, batch: Tensor) -> Tensor:
        """Leave the gradients of the mean loss over all ranks' rows; returns that of this rank's, of no dims.

        Where another rank of the pipeline has it, 0: `mean_loss` knows.
        """
        ...

    def loss(self, batch: Tensor) -> Tensor:
        """The same without gradients."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients of all ranks by their norm; returns the norm."""
        ...

    def logits(self, tokens: Tensor, place: int) -> Tensor | None:
        """Of the token after `tokens[0, place]`: (vocabulary,), on ranks of the last stage; None on others."""
        ...


class Whole:
    """Every rank runs the model from end to end, on rows of its own; gradients of microbatches add up."""

    def __init__(
        self,
        placed: Placed,
        mesh: disttrain.DeviceMesh,
        num_microbatches: int,
        *,
        uses_kernels: bool,
        reduces_each: bool,
    ) -> None:
        self._model = placed.model
        self._cp = mesh["cp"]
        self._loss = Loss(placed.model.config, mesh["tp"], is_lean=mesh["tp"].size() > 1)
        self._num_microbatches = num_microbatches
        # Routers have losses of their own, which are divided likewise; and gradients of theirs are summed over tp.
        set_loss_scale(self._model, 1 / num_microbatches / mesh["tp"].size())
        # Else whole gradients are kept until the last microbatch, which costs memory and spares messages.
        self._reduces_each = reduces_each
        # The head computes the loss itself, without logits, where it is not cut.
        self._has_loss_in_head = uses_kernels and mesh["tp"].size() == 1

    def train(self, batch: Tensor) -> Tensor:
        total = torch.zeros((), device=batch.device, dtype=torch.float64)
        for number, rows in enumerate(batch.chunk(self._num_microbatches)):
            self._model.set_requires_gradient_sync(self._reduces_each or number == self._num_microbatches - 1)
            with cut(rows, self._cp) as (tokens, targets, share):
                loss = self._loss_of(tokens, targets) * (share / self._num_microbatches)
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def loss(self, batch: Tensor) -> Tensor:
        losses = []
        for rows in batch.chunk(self._num_microbatches):
            with cut(rows, self._cp) as (tokens, targets, share):
                losses.append(self._loss_of(tokens, targets).double() * share)
        return torch.stack(losses).mean()

    def clip(self, max_norm: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def logits(self, tokens: Tensor, place: int) -> Tensor:
        return self._loss.whole(self._model(tokens)[0, place])

    def _loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self._has_loss_in_head:
            with kernels.loss_from_head(self._model.head, targets):
                return self._model(tokens)
        return self._loss(self._model(tokens), targets)


class Pipelined:
    """Each rank has stages of the model; a schedule says when which of them runs on which microbatch."""

    def __init__(self, placed: Placed, mesh: disttrain.DeviceMesh, schedule: Schedule) -> None:
        # Several microbatches' logits are there at a time.
        self._loss = Loss(placed.model.config, mesh["tp"], is_lean=True)
        self._running = PipelineSchedule(placed.stages, schedule, self._loss)
        # One row at a time, for sampling.
        self._rows = PipelineSchedule(placed.stages, forward_only(schedule.placement, 1))
        self._device, self._cp = mesh.world.device, mesh["cp"]
        set_loss_scale(placed.model, 1 / schedule.num_microbatches / mesh["tp"].size())

    def train(self, batch: Tensor) -> Tensor:
        losses: list[Tensor] = []
        with cut(batch, self._cp) as (tokens, targets, self._loss.share):
            self._running.step(tokens, target=targets, losses=losses, return_outputs=False)
        return self._mean(losses)

    def loss(self, batch: Tensor) -> Tensor:
        losses: list[Tensor] = []
        with cut(batch, self._cp) as (tokens, targets, self._loss.share):
            self._running.eval(tokens, target=targets, losses=losses, return_outputs=False)
        return self._mean(losses)

    def clip(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self._running, max_norm)

    def logits(self, tokens: Tensor, place: int) -> Tensor | None:
        outputs = self._rows.eval(tokens)
        return None if outputs is None else self._loss.whole(outputs[0, place])

    def _mean(self, losses: list[Tensor]) -> Tensor:
        if not losses:
            return torch.zeros((), device=self._device, dtype=torch.float64)
        return torch.stack(losses).double().mean()


class Loss:
    """Mean negative log-likelihood of each next token, in nats; logits may be cut along the vocabulary by `tp`.

    `is_lean`: beside logits there is only their gradient, no copy of them in fp32. Logits that are cut ask for it.
    It is multiplied by `share`: see `cut`.
    """

    share = 1.0

    def __init__(self, config: LlamaConfig, mesh: disttrain.DeviceMesh, *, is_lean: bool) -> None:
        self._is_lean = is_lean
        self._vocabulary_size = config.vocabulary_size
        self._mesh = mesh

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits.flatten(0, 1), targets.flatten()
        if self._is_lean:
            loss = tp.vocab_parallel_cross_entropy(logits, targets, self._mesh, vocab_size=self._vocabulary_size)
        else:
            loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
        return loss * self.share

    def whole(self, logits: Tensor) -> Tensor:
        """(own part of the vocabulary,) -> (vocabulary,), on all ranks along `tp`."""
        if self._mesh.size() == 1:
            return logits
        shape = torch.Size([self._vocabulary_size])
        return DTensor.from_local(logits, self._mesh, [Shard(0)], shape=shape, stride=(1,)).full_tensor()


@contextmanager
def cut(rows: Tensor, axis: disttrain.DeviceMesh) -> Iterator[tuple[Tensor, Tensor, float]]:
    """This rank's part of the positions, where `axis` cuts them: inputs, targets, and its share.

    That is its number of targets over the ranks' mean one: times it, the ranks' mean losses have the mean of all.
    """
    tokens, targets = rows[:, :-1], rows[:, 1:]
    if axis.size() == 1:
        yield tokens, targets, 1.0
        return
    batch = cut_batch(axis, tokens, targets=targets)
    with batch.attention():
        yield batch.input_ids, batch.targets, batch.targets.shape[1] * axis.size() / tokens.shape[1]


def mean_loss(loss: Tensor, plan: MeshPlan) -> float:
    """Over all ranks' rows, of what each rank's `train` or `loss` returned."""
    total = loss.detach().double()
    disttrain.all_reduce(total)
    # Of a pipeline only the last stage's ranks have any.
    return total.item() * plan.pp / disttrain.get_world_size()
