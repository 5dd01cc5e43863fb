"""Simulates a step of training without tensors: what is allocated when, and what is sent. Pure.

The state machine that decides for `fully_shard` gets the events of modules that run in the order of their registration.
The step is the second one or later, when that order has been learnt. The machine's commands are carried out on
counters. Activations are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from disttrain.fsdp2.estimating.values import (
    GATHERED,
    PACKED,
    REDUCED,
    UNSHARDED,
    UNSHARDED_GRADIENTS,
    GroupSizes,
    Message,
    ParamSizes,
    Peak,
    SizedModule,
    sizes_of,
)
from disttrain.fsdp2.machine import commands as do
from disttrain.fsdp2.machine.group import Bundle, Group, Status, post_forward_mesh_size
from disttrain.fsdp2.machine.model import Model
from disttrain.fsdp2.machine.schedule import finish_all, reduce_all, reshard_all, set_scheduled, unshard_all
from disttrain.fsdp2.machine.unit import backward_leaves, gradient_is_ready, wait_for_unshard
from disttrain.fsdp2.transfers.forms import ALIGNMENT_BYTES, reduces_in_place

LOSS, STEADY, REDUCTIONS, REDUCED_ALL = "the loss", "the steady phase", "the reductions", "after the reductions"
"""Stretches of a step that have a name of their own."""

Parts = Sequence[tuple[GroupSizes, Sequence[ParamSizes]]]


@dataclass(eq=False)
class _Gathering:
    """A gather in progress: its input, which is held until it has ended, and the buffer that is then copied from."""

    held_bytes: int
    output_bytes: int
    is_allocated: bool
    """The gathered parameters have their memory already."""


@dataclass(eq=False)
class _Reduction:
    """A reduction in progress: its gradients, its input while that is held, and whether a sum over replicas follows."""

    parts: Parts
    packed_bytes: int
    has_sum: bool
    is_direct: bool
    """Gradients are handed out as they are."""


class Rehearsal:
    """A step of `root`; `has_streams` on CUDA; `bundles` are what goes over the wire together."""

    def __init__(self, root: SizedModule, bundles: Sequence[Bundle] = (), *, has_streams: bool) -> None:
        self.stretches: list[Peak] = []
        """The peak of each stretch of the step, in their order."""
        self.messages: list[Counter[Message]] = []
        """The messages of each microbatch."""
        self._root = root
        self._has_streams = has_streams
        self._gathering: dict[Group, _Gathering] = {}
        self._memory: Counter[str] = Counter()
        self._total = 0
        self._most = 0
        self._num_kept = 0
        self._copied_out = 0
        self._reducing: list[_Reduction] = []
        in_order = list(root.modules())
        self._model = Model(root.unit, list(dict.fromkeys(module.unit for module in in_order)))
        self._model.bundles = bundles
        for module in in_order:
            self._model.order.visit(module.unit)
        self._handlers: dict[type[do.Command], Callable[..., Any]] = {
            do.Gather: self._gather,
            do.Wait: self._wait,
            do.Free: self._free,
            do.DropPart: self._drop_part,
            do.KeepGrads: self._keep_gradients,
            do.Reduce: self._reduce,
            do.Finish: self._finish,
            do.Settle: self._release_gathered,
        }

    @property
    def peak(self) -> Peak:
        """The fullest moment of the step."""
        return max((Peak("", {}), *self.stretches), key=lambda stretch: stretch.num_bytes)

    def run(self, num_microbatches: int, *, reduces_each: bool) -> None:
        """Go through the step. Gradients are reduced after each microbatch, or after the last."""
        for microbatch in range(num_microbatches):
            self.messages.append(Counter())
            for unit in self._model.units:
                unit.reduces = reduces_each or microbatch + 1 == num_microbatches
            self._carry_out(self._model.iteration_begins(()))
            self._forward(self._root)
            self._begin(LOSS)
            self._carry_out(self._model.backward_begins())
            self._backward(self._root)
            self._carry_out(self._model.backward_ends())
            for param in self._params():
                param.num_seen = 0

    def run_scheduled(self) -> None:
        """Simulates a step that a schedule controls: all parameters are gathered, the gradients of many microbatches
        are summed in the dtype of their reduction, and reduced at the end."""
        units = self._model.units
        self.messages.append(Counter())
        self._begin("the gathers")
        for unit in units:
            self._carry_out(set_scheduled(unit, is_scheduled=True))
        self._carry_out(unshard_all(units))
        for unit in units:
            self._carry_out(wait_for_unshard(unit))
        self._release_gathered()
        for param in self._params():
            param.has_kept_gradient = param.is_trained
            self._add(UNSHARDED_GRADIENTS, param.kept_bytes * param.is_trained)
        self._begin(STEADY)
        self._begin(REDUCTIONS)
        self._carry_out(reduce_all(self._model, units, 1.0))
        self._begin(REDUCED_ALL)
        self._carry_out(finish_all())
        self._carry_out(reshard_all(units))

    def _params(self) -> list[ParamSizes]:
        return [param for group in self._model.groups for param in sizes_of(group).params]

    def _begin(self, when: str, *, is_backward: bool = False) -> None:
        """Another stretch of the step."""
        self._most = self._total
        self.stretches.append(Peak(when, dict(self._memory), self._num_kept, is_backward))

    def _carry_out(self, commands: do.Commands) -> None:
        for command in commands:
            if type(command) in self._handlers:
                self._handlers[type(command)](*command)

    def _forward(self, module: SizedModule) -> None:
        self._num_kept += module is not self._root
        self._begin(f"the forward of {module.name}")
        self._carry_out(self._model.forward_begins(module.unit))
        for part in module.body:
            if isinstance(part, SizedModule):
                self._forward(part)
        self._model.leaves_forward(module.unit)
        self._carry_out(self._model.forward_ends(module.unit))

    def _backward(self, module: SizedModule) -> None:
        is_below = module is not self._root
        self._begin(f"the backward of {module.name}", is_backward=is_below)
        self._carry_out(self._model.gradient_reaches(module.unit))
        self._carry_out(self._model.backward_enters(module.unit))
        for part in reversed(module.body):
            if isinstance(part, SizedModule):
                self._backward(part)
                self._begin(f"the backward of {module.name}", is_backward=is_below)
            else:
                self._differentiate(module, *part)
        self._carry_out(backward_leaves(module.unit))
        self._num_kept -= is_below

    def _differentiate(self, module: SizedModule, group: Group, param: ParamSizes) -> None:
        """The backward of one use of a parameter produces a gradient; those of several uses are added up."""
        if not param.is_trained:
            return
        param.num_seen += 1
        self._add(UNSHARDED_GRADIENTS, param.whole_bytes)
        if param.num_seen > 1:
            # The engine keeps both terms until their sum exists.
            self._add(UNSHARDED_GRADIENTS, param.whole_bytes)
            self._drop(UNSHARDED_GRADIENTS, 2 * param.whole_bytes)
        if param.num_seen < param.num_uses:
            return
        if param.has_unsharded_gradient:
            # Added to that of the last microbatch, in place.
            self._drop(UNSHARDED_GRADIENTS, param.whole_bytes)
        param.has_unsharded_gradient = True
        for number, bucket in enumerate(group.buckets.params if group.buckets is not None else ()):
            if param in bucket:
                self._carry_out(gradient_is_ready(module.unit, group, number, param))

    def _gather(self, needed: Group, groups: Sequence[Group]) -> None:
        sizes, all_sizes = sizes_of(needed), [sizes_of(group) for group in groups]
        was_kept = needed.status is Status.PART_KEPT
        is_alone = len(groups) == 1 and not was_kept and sizes.may_be_in_place
        is_alone = is_alone and (sizes.num_shards > 1 or sizes.is_offloaded)
        goes_in_place = is_alone and any(param.is_in_place for param in sizes.params)
        in_place = [param for param in sizes.params if goes_in_place and param.is_in_place and param.sent_bytes]
        sent_bytes = _joint_bytes(all_sizes)
        rest_bytes = sent_bytes - sum(param.sent_bytes for param in in_place)
        num_collectives = len(in_place) + (rest_bytes > 0) if goes_in_place else 1
        packed_bytes = rest_bytes if goes_in_place or len(groups) > 1 else 0
        is_lone = sizes.num_shards == 1 and not goes_in_place and not was_kept
        is_shard = is_lone and len(groups) == 1 and not sizes.is_offloaded and not sizes.is_of_bytes
        if goes_in_place:
            self._add(UNSHARDED, sizes.whole_bytes)
        else:
            self._release_gathered()
        if was_kept:
            (num_ranks, held_bytes), sizes.kept = sizes.kept, (0, 0)
        else:
            num_ranks, held_bytes = sizes.num_shards, packed_bytes
            for each in all_sizes:
                held_bytes += 0 if is_shard else each.cast_bytes
                held_bytes += each.shard_bytes if each.is_offloaded and self._has_streams else 0
            self._add(GATHERED, held_bytes)
        if is_shard:
            output_bytes = 0
        elif is_lone:
            # What is made to be sent is what has come.
            output_bytes = packed_bytes or sizes.cast_bytes or held_bytes
        else:
            output_bytes = rest_bytes * sizes.num_shards
        if is_lone:
            held_bytes -= output_bytes
        else:
            self._add(GATHERED, output_bytes)
        self._send("all_gather", num_ranks, sent_bytes * sizes.num_shards, num_collectives)
        # Memory that a transport reads, or a stream other than its owner, is held until that has been waited for. If it
        # has been packed, only the packed copy is.
        held_on = 0 if self._has_streams and not was_kept else packed_bytes if len(groups) > 1 else held_bytes
        self._drop(GATHERED, held_bytes - held_on)
        gathering = _Gathering(held_on, output_bytes, goes_in_place)
        self._gathering.update(dict.fromkeys(groups, gathering))

    def _wait(self, group: Group) -> None:
        gathering = self._gathering[group]
        if not gathering.is_allocated:
            for each in group.gathered_with:
                self._add(UNSHARDED, sizes_of(each).whole_bytes)
        self._drop(GATHERED, gathering.held_bytes)
        if gathering.output_bytes:
            self._release_gathered()
            self._copied_out = gathering.output_bytes

    def _release_gathered(self, *_: object) -> None:
        self._drop(GATHERED, self._copied_out)
        self._copied_out = 0

    def _free(self, group: Group, keep_on: int | None) -> None:
        sizes = sizes_of(group)
        if keep_on is not None:
            keep_on = post_forward_mesh_size(sizes.num_shards, keep_on)
            part_bytes = sizes.sent_bytes * (sizes.num_shards // keep_on)
            self._add(GATHERED, part_bytes)
            sizes.kept = keep_on, part_bytes
        self._drop(UNSHARDED, sizes.whole_bytes)

    def _drop_part(self, group: Group) -> None:
        self._drop(GATHERED, sizes_of(group).kept[1])

    def _keep_gradients(self, group: Group) -> None:
        self._add_up([param for param in sizes_of(group).params if param.kept_bytes != param.whole_bytes])

    def _add_up(self, params: Sequence[ParamSizes]) -> None:
        """Add unsharded gradients to sums in the dtype in which they will be reduced."""
        for param in params:
            if param.has_unsharded_gradient:
                if not param.has_kept_gradient:
                    self._add(UNSHARDED_GRADIENTS, param.kept_bytes)
                self._drop(UNSHARDED_GRADIENTS, param.whole_bytes)
                param.has_kept_gradient, param.has_unsharded_gradient = True, False

    def _reduce(self, owed: Sequence[tuple[Group, Sequence[ParamSizes]]], *_: object) -> None:
        trained_of = [(sizes_of(group), [param for param in params if param.is_trained]) for group, params in owed]
        parts: Parts = [(sizes, trained) for sizes, trained in trained_of if trained]
        every = [param for _, trained in parts for param in trained]
        self._add_up([param for param in every if param.has_kept_gradient])
        packed_bytes, reduced_bytes = (
            sum(each.packed_bytes for each in every),
            sum(each.reduced_bytes for each in every),
        )
        forms = [[param.is_in_place for param in sizes.params] for sizes, _ in parts]
        num_in_place = sum(param.is_in_place for param in every) if len(parts) == 1 or reduces_in_place(forms) else 0
        num_collectives = num_in_place + (num_in_place < len(every))
        first = parts[0][0]
        self._send("reduce_scatter", first.num_shards, packed_bytes, num_collectives)
        is_direct = all(sizes.is_lone and all(map(_fits, trained)) for sizes, trained in parts)
        if first.num_shards == 1 and not num_in_place:
            # What is packed is what comes out.
            packed_bytes = 0
        if not is_direct:
            self._add(PACKED, packed_bytes + reduced_bytes)
        if first.num_replicas > 1:
            self._send("all_reduce", first.num_replicas, 2 * reduced_bytes)
        for param in every:
            self._drop(UNSHARDED_GRADIENTS, param.whole_bytes * param.has_unsharded_gradient)
            self._drop(UNSHARDED_GRADIENTS, param.kept_bytes * param.has_kept_gradient)
            param.has_unsharded_gradient = param.has_kept_gradient = False
        if is_direct:
            packed_bytes = sum(param.gradient_bytes for param in every)
            self._add(PACKED, packed_bytes)
        self._reducing.append(_Reduction(parts, packed_bytes, first.num_replicas > 1, is_direct))

    def _finish(self, but_last_sum: bool, if_partial: bool, _: object) -> None:
        if if_partial:
            return
        goes_on = but_last_sum and bool(self._reducing) and self._reducing[-1].has_sum
        if goes_on:
            self._let_go_of_input(self._reducing[-1])
        while len(self._reducing) > goes_on:
            first = self._reducing.pop(0)
            for sizes, trained in reversed(first.parts):
                self._finish_reduction(sizes, trained, first)
            self._let_go_of_input(first)

    def _let_go_of_input(self, reduction: _Reduction) -> None:
        self._drop(PACKED, reduction.packed_bytes)
        reduction.packed_bytes = 0

    def _finish_reduction(self, sizes: GroupSizes, trained: Sequence[ParamSizes], reduction: _Reduction) -> None:
        gradient_bytes = sum(param.gradient_bytes for param in trained)
        if reduction.is_direct:
            self._drop(PACKED, gradient_bytes)
            reduction.packed_bytes -= gradient_bytes
        reduced_bytes = 0 if reduction.is_direct else sum(param.reduced_bytes for param in trained)
        if reduced_bytes == gradient_bytes:
            self._drop(PACKED, reduced_bytes)
        self._add(REDUCED, gradient_bytes)
        if reduced_bytes != gradient_bytes:
            self._drop(PACKED, reduced_bytes)
        if sizes.is_offloaded:
            if not self._has_streams:
                self._add(REDUCED, gradient_bytes)
            self._drop(REDUCED, gradient_bytes)
        elif all(param.has_gradient for param in trained):
            # Added to those of the last microbatch, in place.
            self._drop(REDUCED, gradient_bytes)
        for param in trained:
            param.has_gradient = True

    def _send(self, operation: str, num_ranks: int, num_bytes: int, num_collectives: int = 1) -> None:
        """In a ring each rank sends on the parts of all ranks but one."""
        message = Message(operation, num_ranks, num_bytes * (num_ranks - 1) // num_ranks, num_collectives)
        self.messages[-1][message] += 1

    def _add(self, kind: str, num_bytes: int) -> None:
        self._memory[kind] += num_bytes
        self._total += num_bytes
        if self._total > self._most:
            self._most = self._total
            self.stretches[-1] = replace(self.stretches[-1], by_kind=dict(self._memory))

    def _drop(self, kind: str, num_bytes: int) -> None:
        self._memory[kind] -= num_bytes
        self._total -= num_bytes


def _joint_bytes(groups: Sequence[GroupSizes]) -> int:
    """Counts the bytes that a rank gives to one gather of all groups. If dtypes differ, each group begins at an offset
    that is aligned for every dtype."""
    step = 1 if len({group.gathered_as for group in groups}) == 1 else ALIGNMENT_BYTES
    return sum(-(-group.sent_bytes // step) * step for group in groups)


def _fits(param: ParamSizes) -> bool:
    """True if the gradient has the dtype of the parameter, and nothing to lose in that of its reduction."""
    return param.whole_bytes == param.gradient_bytes <= param.kept_bytes and not param.has_kept_gradient
