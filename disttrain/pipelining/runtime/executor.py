"""Runs the actions of one rank, in their order: one loop, and a method for each kind of action.

Each action waits only for its own inputs. Receives are posted where the schedule says, sends right after the
computation, and both in the order that the verifier has checked. In the first pass the sizes of messages are not known
yet. Each message is then received when it is needed, together with earlier ones from the same rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from disttrain.errors import ScheduleError
from disttrain.pipelining._torch import edge_of
from disttrain.pipelining.model.backward import Backward
from disttrain.pipelining.runtime.in_flight import Batch, Handed, InFlight, Input, Message, Pass, in_traces, label_of
from disttrain.pipelining.runtime.learning import MetadataExchange
from disttrain.pipelining.runtime.losses import Losses
from disttrain.pipelining.runtime.message_metadata import (
    MessageMetadata,
    TensorMetadata,
    gradient_part,
    metadata_of,
    part_of,
    received,
    sent_gradient,
)
from disttrain.pipelining.runtime.messages import Messenger
from disttrain.pipelining.runtime.routes import Hop, Routes
from disttrain.pipelining.runtime.sharded import forget_recording, reset_iteration, schedule_modules
from disttrain.pipelining.runtime.streams import Streams, are_apart
from disttrain.pipelining.runtime.tied import TiedGradients
from disttrain.pipelining.schedule.action import Action, Op
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.pipelining.stage import PipelineStage, as_arguments
from disttrain.process_group._torch import profiler

_Step = tuple[Callable[[Action], None], Action, str]


class _Program(NamedTuple):
    """A schedule, prepared to run: the function for each action of this rank, the label that observers are told, and
    the stages that each stage takes from and gives to."""

    schedule: Schedule
    steps: list[_Step]
    givers: list[list[Hop]]
    takers: list[list[Hop]]
    overlaps: bool


class Executor:
    """One rank's stages, and its ways to the others'. All `run` the same schedules in the same order."""

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        routes: Routes,
        messenger: Messenger,
        device: torch.device,
        *,
        fuses_sums: bool,
    ) -> None:
        self._stages = stages
        self._routes = routes
        self._messenger = messenger
        self._fuses_sums = fuses_sums
        group = next(iter(stages.values())).group
        self._rank, self._world = group.group_rank, group.world
        self._programs: dict[bool, _Program] = {}
        self._last_metadata: dict[int, MessageMetadata] = {}
        self._streams = Streams(device)
        self._are_apart = are_apart(stage.submod for stage in stages.values())
        self._tied = TiedGradients(stages, routes)
        self._sharded = {stage: module.scheduled_modules() for stage, module in stages.items()}
        schedule_modules([sharded for modules in self._sharded.values() for sharded in modules])
        self._do = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.OVERLAP: self._overlap,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.SEND_TIED: self._send_tied,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.RECV_TIED: self._receive,
            Op.UNSHARD: self._unshard,
            Op.RESHARD: self._reshard,
            Op.REDUCE_GRAD: self._reduce_grad,
        }

    def run(self, schedule: Schedule, exchange: MetadataExchange, batch: Batch, losses: Losses) -> None:
        """This rank's actions of a lowered schedule. Collective: every rank of the pipeline runs its own."""
        self._schedule, self._exchange = schedule, exchange
        self._home = schedule.placement.ranks
        self._now = Pass(batch, losses)
        world = self._world
        program = self._program_of(schedule)
        self._givers, self._takers = program.givers, program.takers
        self._streams.begin(self._stages if program.overlaps and self._are_apart else ())
        self._messenger.may_wait = not exchange.is_learning
        self._fuses_now = self._fuses_sums and not self._streams.run_side_by_side
        if schedule.has_backward:
            self._tied.begin()
        is_named = profiler._is_profiler_enabled
        with torch.set_grad_enabled(schedule.has_backward):
            for do, action, label in program.steps:
                world.action = label
                try:
                    (in_traces(do, action) if is_named else do)(action)
                except Exception as error:
                    error.add_note(f"in {action}, which is an action of rank {self._rank} of the pipeline")
                    raise
        world.action = ""
        self._streams.end()
        self._streams.hold_back()
        for stage in self._stages:
            self._finish_grads(stage)
        if schedule.has_backward:
            self._take_tied()
        self._messenger.finish()
        exchange.end_pass()
        if exchange.is_learning:
            # The next pass may have none of these sizes.
            self._streams.forget_buffers()
        self.reset()

    def _program_of(self, schedule: Schedule) -> _Program:
        program = self._programs.get(schedule.has_backward)
        if program is None or program.schedule is not schedule:
            actions = schedule.ranks[self._rank]
            overlaps = any(action.op is Op.OVERLAP for action in actions)
            do = dict.fromkeys(self._do, self._on_stream) | {Op.OVERLAP: self._overlap} if overlaps else self._do
            steps: list[_Step] = [(do[action.op], action, label_of(action)) for action in actions]
            program = _Program(schedule, steps, self._routes.givers(schedule), self._routes.takers(schedule), overlaps)
            self._programs[schedule.has_backward] = program
        return program

    def reset(self) -> None:
        """Let go of what the last pass had under way."""
        self._now = Pass(Batch((), ()), _NO_LOSSES)
        self._world.action = ""
        self._streams.forget()

    def forget_failed(self, *, is_recorded: bool = False) -> None:
        """The same after an error, also for sharded modules; nothing waits for what was to be recorded as a graph."""
        self.reset()
        self._tied.forget()
        forget = forget_recording if is_recorded else reset_iteration
        for modules in self._sharded.values():
            forget(modules)

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        module, now = self._stages[stage], self._now
        backward = Backward(now.casts, fuses_sums=self._fuses_now)
        args, inputs = self._inputs(stage, microbatch)
        with backward.forward():
            output = module.submod(*args, **now.batch.kwargs[microbatch])
        del args
        if module.output_metadata is not None:
            _check_example(module.output_metadata, f"what stage {stage} returns", output, "output_args")
        in_flight = InFlight(backward, inputs)
        if module.is_last:
            loss = now.losses.take(microbatch, output)
            if loss is not None:
                in_flight.roots, in_flight.root_grads = [loss], [now.losses.root_grad(loss)]
        else:
            self._hand_on(stage, microbatch, output, in_flight)
        if self._schedule.has_backward:
            now.in_flight[stage, microbatch] = in_flight

    def _inputs(self, stage: int, microbatch: int) -> tuple[tuple[Any, ...], list[Input]]:
        """The arguments of a forward; and the tensors among them that come from other stages."""
        module = self._stages[stage]
        inputs: list[Input] = []
        if module.is_first:
            args = self._now.batch.args[microbatch]
        else:
            args = ()
            for giver in self._givers[stage]:
                metadata, tensors = self._take(giver, stage, microbatch)
                numbers = range(len(metadata.tensors)) if giver.numbers is None else giver.numbers
                received_values = [
                    Input(giver.stage, which, metadata.tensors[which], tensor)
                    for which, tensor in zip(numbers, tensors, strict=True)
                ]
                inputs += received_values
                if giver.numbers is None:
                    args = as_arguments(metadata.build(tensors))
            if module.inputs is not None:
                by_source = {(value.source, value.which): value.tensor for value in inputs}
                args = tuple(by_source[pair] for pair in module.inputs)
        if module.input_metadata is not None:
            _check_example(module.input_metadata, f"what stage {stage} is given", args, "input_args")
        return args, inputs

    def _take(self, giver: Hop, stage: int, microbatch: int) -> tuple[MessageMetadata, list[torch.Tensor]]:
        """Returns the output of another stage, as leaves."""
        message = giver.stage, stage, microbatch
        if giver.is_here:
            metadata, tensors, made = self._now.handed.pop(message)
            assert metadata is not None
            self._streams.follow(stage, made, tensors)
            wanted = _kept(metadata, giver.numbers)
            return metadata, [
                tensor.detach().requires_grad_(meta.wants_grad) for meta, tensor in zip(wanted, tensors, strict=True)
            ]
        metadata = self._exchange.hear(*message)
        parts, find_mesh = self._arrived(message), self._stages[stage].find_mesh
        wanted = _kept(metadata, giver.numbers)
        return metadata, [received(meta, part, find_mesh) for meta, part in zip(wanted, parts, strict=True)]

    def _hand_on(self, stage: int, microbatch: int, output: Any, in_flight: InFlight) -> None:
        """To all stages that take something of it."""
        metadata, tensors = metadata_of(output, self._last_metadata.get(stage))
        self._last_metadata[stage] = metadata
        if self._schedule.has_backward:
            in_flight.roots = [edge_of(tensor) for tensor in tensors]
            in_flight.outputs = metadata.tensors
            in_flight.meshes = [getattr(tensor, "device_mesh", None) for tensor in tensors]
        for target, numbers, is_here in self._takers[stage]:
            if numbers and numbers[-1] >= len(tensors):
                raise ScheduleError(
                    "pipelining.step",
                    f"stage {target} takes value {numbers[-1]} of stage {stage}, which returns {len(tensors)} tensors.",
                    "Count them from 0.",
                )
            chosen = tensors if numbers is None else [tensors[which] for which in numbers]
            message = stage, target, microbatch
            if is_here:
                made = self._streams.mark(stage)
                self._now.handed[message] = Handed(metadata, [tensor.detach() for tensor in chosen], made)
            else:
                self._exchange.tell(*message, metadata)
                self._now.outbox[message] = [part_of(tensor) for tensor in chosen]

    def _backward(self, action: Action) -> None:
        in_flight, grads = self._output_grads(action)
        tensors = [value.tensor for value in in_flight.inputs]
        self._hand_back(action, in_flight, in_flight.backward.backward(in_flight.roots, grads, tensors))
        del self._now.in_flight[action.stage, action.microbatch]  # type: ignore[arg-type]

    def _backward_input(self, action: Action) -> None:
        in_flight, grads = self._output_grads(action)
        tensors = [value.tensor for value in in_flight.inputs]
        self._hand_back(action, in_flight, in_flight.backward.backward_input(in_flight.roots, grads, tensors))
        # Only the inputs of its weights' gradients are kept.
        in_flight.inputs, in_flight.roots, in_flight.root_grads = (), (), None

    def _backward_weight(self, action: Action) -> None:
        in_flight = self._now.in_flight.pop((action.stage, action.microbatch))  # type: ignore[arg-type]
        in_flight.backward.backward_weight()

    def _output_grads(self, action: Action) -> tuple[InFlight, Sequence[torch.Tensor | None]]:
        """A microbatch in flight, and the gradients of its stage's outputs: the sums of those that come back."""
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        in_flight = self._now.in_flight[stage, microbatch]
        if in_flight.root_grads is not None:
            return in_flight, in_flight.root_grads
        totals: list[torch.Tensor | None] = [None] * len(in_flight.roots)
        for target, numbers, is_here in self._takers[stage]:
            taken = range(len(totals)) if numbers is None else numbers
            wanted = [which for which in taken if in_flight.outputs[which].wants_grad]
            message = target, stage, microbatch
            if is_here:
                _, grads, made = self._now.handed.pop(message)
                self._streams.follow(stage, made, grads)
            else:
                grads = [
                    sent_gradient(in_flight.outputs[which], part, in_flight.meshes[which])
                    for which, part in zip(wanted, self._arrived(message), strict=True)
                ]
            for which, grad in zip(wanted, grads, strict=True):
                total = totals[which]
                totals[which] = grad if total is None else total + grad
        return in_flight, totals

    def _hand_back(self, action: Action, in_flight: InFlight, grads: Sequence[torch.Tensor | None]) -> None:
        """Each stage that gave something gets the gradients of it."""
        for source, _, is_here in self._givers[action.stage]:
            wanted = [
                (value, grad)
                for value, grad in zip(in_flight.inputs, grads, strict=True)
                if value.source == source and value.metadata.wants_grad
            ]
            message = action.stage, source, action.microbatch
            if is_here:
                whole = [torch.zeros_like(value.tensor) if grad is None else grad for value, grad in wanted]
                self._now.handed[message] = Handed(None, whole, self._streams.mark(action.stage))
            else:
                self._now.outbox[message] = [
                    gradient_part(value.metadata, grad, value.tensor) for value, grad in wanted
                ]

    def _overlap(self, action: Action) -> None:
        is_named = profiler._is_profiler_enabled
        for part in action.parts:
            (in_traces(self._on_stream, part) if is_named else self._on_stream)(part)

    def _on_stream(self, action: Action) -> None:
        """Do it on its stage's own stream."""
        with self._streams.of(action.stage):
            self._do[action.op](action)

    def _send(self, action: Action) -> None:
        stage, peer = action.stage, action.peer
        assert peer is not None
        self._messenger.send(self._now.outbox.pop((stage, peer, action.microbatch)), self._home[peer])

    def _receive(self, action: Action) -> None:
        if self._exchange.is_learning:
            assert action.peer is not None
            self._now.due.setdefault(self._home[action.peer], deque()).append(action)
        else:
            self._post(action)

    def _post(self, action: Action) -> None:
        """Start receiving."""
        stage, peer = action.stage, action.peer
        assert peer is not None
        buffers = self._buffers(action)
        self._now.inbox[peer, stage, action.microbatch] = self._messenger.receive(buffers, self._home[peer]), buffers

    def _buffers(self, action: Action) -> list[torch.Tensor]:
        stage, peer, microbatch = action.stage, action.peer, action.microbatch
        assert peer is not None
        if microbatch is None:
            return self._tied.buffers(peer, stage)
        wanted: Iterable[TensorMetadata]
        if action.op is Op.RECV_F:
            wanted = _kept(self._exchange.hear(peer, stage, microbatch), self._routes.taken(peer, stage))
        else:
            # The gradients that come back.
            sent = _kept(self._exchange.told(stage, peer, microbatch), self._routes.taken(stage, peer))
            wanted = (metadata for metadata in sent if metadata.wants_grad)
        pool = self._streams.buffers(stage)
        return [pool.take(metadata.shape, metadata.dtype) for metadata in wanted]

    def _arrived(self, message: Message) -> Sequence[torch.Tensor]:
        """Returns the tensors that have been received."""
        now = self._now
        if message not in now.inbox:
            due = now.due[self._home[message[0]]]
            while message not in now.inbox:
                # Of another stage, perhaps.
                with self._streams.of(due[0].stage):
                    self._post(due.popleft())
        works, parts = now.inbox.pop(message)
        for work in works:
            work.wait()
        return parts

    def _send_tied(self, action: Action) -> None:
        assert action.peer is not None
        self._finish_grads(action.stage)
        parts = self._tied.parts(action.stage, action.peer)
        self._messenger.send(parts, self._home[action.peer], is_regular=False)

    def _take_tied(self) -> None:
        waiting = [(action.peer, action.stage, action.microbatch) for due in self._now.due.values() for action in due]
        for source, target, microbatch in [*self._now.inbox, *waiting]:
            assert source is not None
            self._tied.take(source, target, self._arrived((source, target, microbatch)))
        self._tied.finish()

    def _unshard(self, action: Action) -> None:
        for module in self._sharded[action.stage]:
            module.unshard_all()

    def _reshard(self, action: Action) -> None:
        for module in self._sharded[action.stage]:
            module.reshard_all()

    def _reduce_grad(self, action: Action) -> None:
        for module in self._sharded[action.stage]:
            module.reduce_grads()

    def _finish_grads(self, stage: int) -> None:
        for module in self._sharded[stage]:
            module.finish_grads()


def _kept(metadata: MessageMetadata, numbers: tuple[int, ...] | None) -> Sequence[TensorMetadata]:
    """The tensors of a message of these `numbers`, of which another stage makes use; None: all."""
    return metadata.tensors if numbers is None else [metadata.tensors[which] for which in numbers]


def _check_example(example: MessageMetadata, subject: str, value: Any, name: str) -> None:
    example.check(subject, metadata_of(value)[0].without_grad(), f"in {name}", f"Give other {name}, or none.")


_NO_LOSSES = Losses(None, None, {}, 1.0, keeps_outputs=False, has_backward=False)
