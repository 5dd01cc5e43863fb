"""A schedule on real ranks: batches in, losses and gradients out."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import nn

from disttrain.errors import ScheduleError
from disttrain.pipelining.microbatch import merge_chunks, split_args_kwargs_into_chunks
from disttrain.pipelining.model.layers import split_layers
from disttrain.pipelining.passes.lower import lower
from disttrain.pipelining.runtime.in_flight import Batch
from disttrain.pipelining.runtime.losses import Losses
from disttrain.pipelining.runtime.messages import messenger_of
from disttrain.pipelining.runtime.refusing import refusing
from disttrain.pipelining.runtime.routes import RankFacts, Routes, StageFacts, agree
from disttrain.pipelining.runtime.running import Running, tell_failure
from disttrain.pipelining.runtime.tied import find_problem, tied_forms
from disttrain.pipelining.schedule.action import Op
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.csv_form import to_csv
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.stage import PipelineStage, stages_of
from disttrain.process_group import ProcessGroup, all_gather_object

_OPERATION = "pipelining.step"
_AHEAD_ON_HOST = 4
"""A number of computations: over a network, the sender learns of a free buffer one latency late, and sends after
that."""


class PipelineSchedule:
    """Trains the stages of a pipeline by a schedule; of each rank it has its own stages.

        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        schedule.step(inputs)                       # the first stage's rank
        schedule.step(target=labels, losses=losses) # the last stage's rank
        schedule.step()                             # all others

    The subclasses are the schedules by name; this class runs any `Schedule` there is, one that `search` has found say.

    Args: stages     this rank's, all of one pipeline;
          schedule   computations only, as a generator returns them; the same on all ranks;
          loss_fn    called with output and target of a microbatch, on the rank of the last stage; returns one number.
                     Without it `step` only runs forwards. All ranks give one, or none;
          args_chunk_spec, kwargs_chunk_spec, output_merge_spec  how batches are cut and outputs joined (`microbatch`);
          scale_grads  True: the loss of a batch is the mean of its microbatches', False: their sum. Where losses are
                     means over as many tokens as each microbatch has, let loss_fn return a sum over tokens divided by
                     the batch's count, which `loss_kwargs` can bring, and give False;
          dynamic_shapes  sizes may change from one microbatch to the next (`Microbatches` holds such), and from step to
                     step; costs a message through the store each;
          max_unsharded   of sharded stages, as many as this rank may have whole at once; default: all;
          costs      measured times, by which messages are ordered;
          num_ahead  how many computations ahead of its use a receive is posted; default: 4, since a Gloo sender waits
                     until it is told of room, on CUDA 0, since a kernel of NCCL's that waits takes cores from what is
                     computed meanwhile;
          copy_engines  False: on CUDA, leave messages to NCCL also between GPUs of one host;
          fuse_accumulation  True: the products of linear layers add to the gradients of earlier microbatches: faster,
                     with less memory, and rounded once instead of twice, so not bit for bit what autograd makes.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        schedule: Schedule,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        dynamic_shapes: bool = False,
        max_unsharded: int | None = None,
        costs: Costs | None = None,
        num_ahead: int | None = None,
        copy_engines: bool = True,
        fuse_accumulation: bool = False,
    ) -> None:
        stages = stages_of(schedule.name, stages)
        self.stages = {stage.stage_index: stage for stage in stages}
        self.schedule = schedule
        self.scale_grads = scale_grads
        self._group = stages[0].group
        self._device = stages[0].device
        with refusing(self._group, "PipelineSchedule"):
            self._check(stages)
        self._loss_fn = loss_fn
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self._is_dynamic = dynamic_shapes
        self._max_unsharded = max_unsharded
        self._costs = costs
        default = 0 if self._device.type == "cuda" else _AHEAD_ON_HOST
        self._num_ahead = num_ahead if num_ahead is not None else default
        self._uses_copy_engines = copy_engines
        self._fuses_sums = fuse_accumulation
        self._rank = self._group.world.rank
        self._running: Running | None = None
        self._failure = ""
        is_split = any(action.op is Op.BACKWARD_INPUT for actions in schedule.ranks for action in actions)
        if is_split or fuse_accumulation:
            for stage in stages:
                split_layers(stage.submod)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: MutableSequence[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch through the pipeline: forwards, backwards, and the gradients of all stages' parameters.

        Gradients are added to those that are there. Without a loss function, forwards only.

        Args:    args, kwargs  of the whole batch: args on the rank of the first stage; each rank's keywords go to all
                               of its stages;
                 target        of the whole batch, on the rank of the last stage; nested as one likes;
                 losses        filled there with the microbatches' losses, without their graphs;
                 return_outputs  False frees the memory of the outputs at once;
                 loss_kwargs   handed on to loss_fn.
        Returns: on the rank of the last stage the outputs of the batch, when asked for; else None.
        Raises:  ScheduleError on every rank when one of them fails; on that one, its own error. The pipeline is then
                 of no more use.
        Collective: every rank of the pipeline.
        """
        return self._run(self._loss_fn is not None, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: MutableSequence[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forwards only, without graphs. Losses where there is a target. All else as `step`."""
        return self._run(False, args, kwargs, target, losses, return_outputs, loss_kwargs)

    @property
    def group(self) -> ProcessGroup:
        """The ranks of the pipeline."""
        return self._group

    @property
    def device(self) -> torch.device:
        """That of this rank's stages."""
        return self._device

    def parameters(self, *, without_copies: bool = False) -> list[nn.Parameter]:
        """Of this rank's stages, each once. `without_copies`: a tied weight only on the rank of its first stage.

        Raises: ScheduleError without copies before the first step, in which ranks tell each other what is tied.
        """
        unique = dict.fromkeys(parameter for stage in self.stages.values() for parameter in stage.submod.parameters())
        if without_copies:
            if self._running is None:
                raise ScheduleError(
                    self.schedule.name,
                    "no step has been run, so no rank knows yet of which weights others have copies.",
                    "Call step first.",
                    rank=self._rank,
                )
            routes = self._running.routes
            for stage in self.stages.values():
                for label in stage.tied:
                    if routes.first_with(label) not in self.stages:
                        unique.pop(stage.tied_parameter(label), None)
        return list(unique)

    def _run(
        self,
        is_training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: MutableSequence[torch.Tensor] | None,
        return_outputs: bool,
        loss_kwargs: Mapping[str, Any] | None,
    ) -> Any:
        if self._failure:
            raise ScheduleError(
                self.schedule.name,
                f"an earlier step has failed: {self._failure.rstrip('.')}.",
                "Make the pipeline anew.",
                rank=self._rank,
            )
        running = self._running or self._set_up()
        is_recorded = running.is_recorded(is_training=is_training)
        try:
            if is_training and not torch.is_grad_enabled():
                raise ScheduleError(
                    _OPERATION, "gradients are switched off.", "Leave no_grad, or call eval.", rank=self._rank
                )
            num = self.schedule.num_microbatches
            batch, targets = self._cut(args, kwargs, target, num, is_training)
            made = Losses(
                self._loss_fn,
                targets,
                loss_kwargs or {},
                1 / num if self.scale_grads else 1.0,
                keeps_outputs=return_outputs,
                has_backward=is_training,
            )
            running.run(batch, made, is_training=is_training)
            outputs = [made.outputs[microbatch] for microbatch in sorted(made.outputs)]
            merged = merge_chunks(outputs, self._output_merge_spec) if outputs else None
        except Exception as error:
            if is_recorded:
                running.forget_recording(error)
                raise
            first = running.fail(error)
            self._failure = first or f"{type(error).__name__}: {error}"
            if not first:
                raise
            raise ScheduleError(
                _OPERATION,
                f"another rank has failed: {first.rstrip('.')}.",
                "Look there; then make the pipeline anew.",
                rank=self._rank,
            ) from error
        if losses is not None and made.losses:
            losses[:] = [made.losses[microbatch] for microbatch in range(num)]
        return merged

    def _cut(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, num: int, is_training: bool
    ) -> tuple[Batch, list[Any] | None]:
        """The microbatches' arguments and targets, as far as this rank needs them."""
        if 0 not in self.stages:
            args = ()
        spec = self._args_chunk_spec if args else None
        args_cut, kwargs_cut = split_args_kwargs_into_chunks(args, kwargs, num, spec, self._kwargs_chunk_spec)
        batch = Batch(args_cut, kwargs_cut)
        if self.schedule.num_stages - 1 not in self.stages:
            return batch, None
        if target is None:
            if is_training:
                raise ScheduleError(
                    _OPERATION,
                    "there is no target on the rank of the last stage, which computes the loss.",
                    "Call step(target=...) there.",
                    rank=self._rank,
                )
            return batch, None
        return batch, [piece["target"] for piece in split_args_kwargs_into_chunks((), {"target": target}, num)[1]]

    def _set_up(self) -> Running:
        """Sets up this rank; all learn what one rank has wrong. Collective."""
        plan = {
            "the schedule": f"{self.schedule.name} on {self.schedule.placement.ranks}",
            "n_microbatches": self.schedule.num_microbatches,
            "the order of actions (by its digest)": self._digest(),
            "scale_grads": self.scale_grads,
            "copy_engines": self._uses_copy_engines,
            "loss_fn": "none" if self._loss_fn is None else "given",
            "dynamic_shapes": self._is_dynamic,
            "the type of device": self._device.type,
        }
        facts = tuple(
            StageFacts(each.stage_index, each.num_stages, each.inputs, tied_forms(each))
            for each in self.stages.values()
        )
        gathered: list[Any] = [None] * self._group.group_size
        messenger_name = "" if self._group.messenger is None else self._group.messenger.name
        rank_facts = RankFacts(facts, plan, find_problem(list(self.stages.values())))
        all_gather_object(gathered, (rank_facts.packed(), uuid.uuid4().hex, messenger_name), self._group)
        routes = agree([RankFacts.unpacked(each) for each, _, _ in gathered], self.schedule.placement)
        messenger = messenger_of(self._group, self._device, [name for _, _, name in gathered])
        name = gathered[0][1]
        try:
            self._running = Running(
                self._group,
                self.stages,
                self.schedule,
                routes,
                self._lowering(routes),
                messenger,
                name,
                self._device,
                is_dynamic=self._is_dynamic,
                num_early=0 if self._device.type == "cuda" or self.schedule.has_messages else self._num_ahead,
                uses_copy_engines=self._uses_copy_engines,
                fuses_sums=self._fuses_sums,
            )
        except Exception as error:
            tell_failure(self._group, name, error)
            messenger.give_up(_OPERATION, error)
            raise
        return self._running

    def _digest(self) -> str:
        """Alike where ranks will list the same messages in the same order."""
        text = f"{to_csv(self.schedule)}{self._costs}{self._num_ahead}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _check(self, stages: Sequence[PipelineStage]) -> None:
        rank = self._group.world.rank
        indices = [stage.stage_index for stage in stages]
        if len(self.stages) < len(stages):
            raise ScheduleError(
                "PipelineSchedule", f"a stage is there twice: {sorted(indices)}.", "Give each once.", rank=rank
            )
        for name, values in {
            "groups": {stage.group.group_name for stage in stages},
            "devices": {str(stage.device) for stage in stages},
        }.items():
            if len(values) > 1:
                raise ScheduleError(
                    "PipelineSchedule",
                    f"the stages {sorted(indices)} are on several {name}: {sorted(values)}.",
                    "Make all stages of a rank for one.",
                    rank=rank,
                )
        if self._group.group_size != self.schedule.num_ranks:
            raise ScheduleError(
                "PipelineSchedule",
                f"{self.schedule.name} is a schedule for {self.schedule.num_ranks} ranks, and the stages' group has "
                f"{self._group.group_size}.",
                "Make one for as many.",
                rank=rank,
            )

    def _lowering(self, routes: Routes) -> Callable[[Schedule], Schedule]:
        def lowered(schedule: Schedule) -> Schedule:
            if schedule.has_messages:
                return schedule
            return lower(
                schedule,
                wiring=routes.wiring,
                costs=self._costs,
                max_unsharded=self._max_unsharded,
                num_ahead=self._num_ahead,
            )

        return lowered
