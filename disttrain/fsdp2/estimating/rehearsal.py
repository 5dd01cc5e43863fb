"""A step of training gone through without tensors: what is allocated when, and what is sent. Pure.

Follows `state.py` and `param_group.py` event by event, for modules that run in the order in which they are registered,
from the second step on, when that order has been learnt. Activations are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from disttrain.fsdp2.collectives import ALIGNMENT_BYTES
from disttrain.fsdp2.estimating.values import (
    GATHERED,
    PACKED,
    REDUCED,
    WHOLE,
    WHOLE_GRADIENTS,
    GroupSizes,
    Message,
    ParamSizes,
    Peak,
    SetSizes,
    SizedModule,
)
from disttrain.fsdp2.transfers.forms import reduces_in_place


@dataclass(eq=False)
class _Gathering:
    """A gather under way: of whom, what is held until it has come, and the buffer that is copied from then."""

    groups: list[GroupSizes]
    held_bytes: int
    output_bytes: int
    is_allocated: bool
    """The wholes have their memory already."""


@dataclass(eq=False)
class _Reduction:
    """A reduction under way: of what, its input while that is held, and whether a sum over replicas follows it."""

    parts: list[tuple[GroupSizes, Sequence[ParamSizes]]]
    packed_bytes: int
    has_sum: bool


class _GroupState:
    """Where the rehearsal is with one group: what is whole, what is on its way, which gradients are there."""

    def __init__(self) -> None:
        self.gathering: _Gathering | None = None
        self.is_whole = False
        self.kept: tuple[int, int] | None = None
        self.uses_seen: Counter[ParamSizes] = Counter()
        self.reduced: set[ParamSizes] = set()
        self.with_whole_gradient: set[ParamSizes] = set()
        self.with_kept_gradient: set[ParamSizes] = set()
        self.with_gradient: set[ParamSizes] = set()


class Rehearsal:
    """A step of `root`; `has_streams` on CUDA; `sets` are what goes over the wire together."""

    def __init__(self, root: SizedModule, sets: Sequence[SetSizes] = (), *, has_streams: bool) -> None:
        self.peak = Peak("", {})
        self.messages: Counter[Message] = Counter()
        self._root = root
        self._has_streams = has_streams
        self._order: list[SizedModule] = []
        self._states: dict[GroupSizes, _GroupState] = {}
        self._memory: Counter[str] = Counter()
        self._total = 0
        self._when = ""
        self._copied_out = 0
        self._reduces = True
        self._sets = {group: each for each in sets for group in each.groups}
        self._owed: dict[SetSizes, dict[GroupSizes, Sequence[ParamSizes]]] = {each: {} for each in sets}
        self._reducing: list[_Reduction] = []
        self._learn(root)

    def run(self, num_microbatches: int, *, reduces_each: bool) -> None:
        """Go through the step; `peak` and `messages` have what it takes. Gradients are reduced after each microbatch,
        or after the last."""
        for microbatch in range(num_microbatches):
            self._reduces = reduces_each or microbatch + 1 == num_microbatches
            self._forward(self._root)
            self._backward(self._root)
            for each in reversed(self._owed):
                self._reduce_owed(each)
            self._finish_reductions()
            self._release_gathered()
            for state in self._states.values():
                state.uses_seen.clear()
                state.reduced.clear()

    def _learn(self, module: SizedModule) -> None:
        self._order.append(module)
        for group in module.groups:
            self._states.setdefault(group, _GroupState())
        for part in module.body:
            if isinstance(part, SizedModule):
                self._learn(part)

    def _forward(self, module: SizedModule) -> None:
        self._when = f"the forward of {module.name}"
        self._gather_now(module)
        chosen = module.forward_prefetch
        self._prefetch(self._neighbour(module, 1) if chosen is None else chosen)
        for part in module.body:
            if isinstance(part, SizedModule):
                self._forward(part)
        if module.frees_after_forward:
            for group in module.groups:
                self._free(group, module.kept_on)

    def _backward(self, module: SizedModule) -> None:
        self._when = f"the backward of {module.name}"
        if module.gathers_in_backward:
            self._gather_now(module)
        chosen = self._neighbour(module, -1) if module.backward_prefetch is None else module.backward_prefetch
        self._prefetch([each for each in chosen if each.gathers_in_backward])
        for part in reversed(module.body):
            if isinstance(part, SizedModule):
                self._backward(part)
            else:
                self._when = f"the backward of {module.name}"
                self._differentiate(*part)
        for group in reversed(module.groups):
            self._free(group, None)
            if self._reduces:
                done = self._states[group].reduced
                self._reduce_with_others(group, [param for param in group.params if param not in done])
            else:
                self._keep_gradients(group, [param for param in group.params if param.kept_bytes != param.whole_bytes])

    def _neighbour(self, module: SizedModule, step: int) -> list[SizedModule]:
        """The next one whose parameters do not come with this one's."""
        place = self._order.index(module) + step
        while 0 <= place < len(self._order):
            if not self._are_mates(module, self._order[place]):
                return [self._order[place]]
            place += step
        return []

    def _are_mates(self, one: SizedModule, other: SizedModule) -> bool:
        joint = self._sets.get(one.groups[0]) if one.groups else None
        return joint is not None and joint.gathers and any(group in joint.groups for group in other.groups)

    def _prefetch(self, modules: list[SizedModule]) -> None:
        for module in modules:
            for group in module.groups:
                self._start_gather(group)

    def _gather_now(self, module: SizedModule) -> None:
        for group in module.groups:
            self._start_gather(group)
        for group in module.groups:
            self._end_gather(group)

    def _start_gather(self, group: GroupSizes) -> None:
        state = self._states[group]
        if state.is_whole or state.gathering is not None:
            return
        groups = self._gathered_with(group)
        is_alone = len(groups) == 1 and state.kept is None and group.may_be_in_place
        goes_in_place = is_alone and any(param.is_in_place for param in group.params)
        in_place = [param for param in group.params if goes_in_place and param.is_in_place and param.sent_bytes]
        sent_bytes = _joint_bytes(groups)
        rest_bytes = sent_bytes - sum(param.sent_bytes for param in in_place)
        num_collectives = len(in_place) + (rest_bytes > 0) if goes_in_place else 1
        packed_bytes = rest_bytes if goes_in_place or len(groups) > 1 else 0
        if goes_in_place:
            self._add(WHOLE, group.whole_bytes)
        else:
            self._release_gathered()
        was_kept = state.kept is not None
        if state.kept is None:
            num_ranks, held = group.num_shards, packed_bytes
            for each in groups:
                held += each.cast_bytes + (each.shard_bytes if each.is_offloaded and self._has_streams else 0)
            self._add(GATHERED, held)
        else:
            (num_ranks, held), state.kept = state.kept, None
        output_bytes = rest_bytes * group.num_shards
        self._add(GATHERED, output_bytes)
        self._send("all_gather", num_ranks, sent_bytes * group.num_shards, num_collectives)
        # What a transport reads, or a stream that is not its owner, is there until it has been waited for; of what has
        # been packed, that alone.
        held_on = 0 if self._has_streams and not was_kept else packed_bytes if len(groups) > 1 else held
        self._drop(GATHERED, held - held_on)
        gathering = _Gathering(groups, held_on, output_bytes, goes_in_place)
        for each in groups:
            self._states[each].gathering = gathering

    def _gathered_with(self, group: GroupSizes) -> list[GroupSizes]:
        joint = self._sets.get(group)
        if joint is None or not joint.gathers or self._states[group].kept is not None:
            return [group]
        states = [(each, self._states[each]) for each in joint.groups]
        return [
            each for each, state in states if not (state.is_whole or state.gathering or state.kept) or each is group
        ]

    def _end_gather(self, group: GroupSizes) -> None:
        gathering = self._states[group].gathering
        if gathering is None:
            return
        for each in gathering.groups:
            self._states[each].gathering, self._states[each].is_whole = None, True
            if not gathering.is_allocated:
                self._add(WHOLE, each.whole_bytes)
        self._drop(GATHERED, gathering.held_bytes)
        if gathering.output_bytes:
            self._release_gathered()
            self._copied_out = gathering.output_bytes

    def _release_gathered(self) -> None:
        self._drop(GATHERED, self._copied_out)
        self._copied_out = 0

    def _free(self, group: GroupSizes, keep_on: int | None) -> None:
        self._end_gather(group)
        state = self._states[group]
        if not state.is_whole:
            return
        if keep_on is not None:
            held = group.sent_bytes * (group.num_shards // keep_on)
            self._add(GATHERED, held)
            state.kept = keep_on, held
        self._drop(WHOLE, group.whole_bytes)
        state.is_whole = False

    def _differentiate(self, group: GroupSizes, param: ParamSizes) -> None:
        """The backward of one use of a parameter leaves a gradient; those of several uses are added up."""
        if not param.is_trained:
            return
        state = self._states[group]
        seen = state.uses_seen
        seen[param] += 1
        self._add(WHOLE_GRADIENTS, param.whole_bytes)
        if seen[param] > 1:
            # The engine leaves both terms as they are until their sum is there.
            self._add(WHOLE_GRADIENTS, param.whole_bytes)
            self._drop(WHOLE_GRADIENTS, 2 * param.whole_bytes)
        if seen[param] < param.num_uses:
            return
        if param in state.with_whole_gradient:
            # Added to that of the last microbatch, in place.
            self._drop(WHOLE_GRADIENTS, param.whole_bytes)
        state.with_whole_gradient.add(param)
        if len(group.early_parts) > 1 and self._reduces:
            for part in group.early_parts:
                if param in part and all(seen[each] == each.num_uses for each in part if each.is_trained):
                    state.reduced.update(part)
                    self._reduce([(group, part)])

    def _keep_gradients(self, group: GroupSizes, params: Sequence[ParamSizes]) -> None:
        """Add whole gradients to sums in the dtype in which they will be reduced."""
        state = self._states[group]
        for param in params:
            if param in state.with_whole_gradient:
                if param not in state.with_kept_gradient:
                    self._add(WHOLE_GRADIENTS, param.kept_bytes)
                self._drop(WHOLE_GRADIENTS, param.whole_bytes)
                state.with_kept_gradient.add(param)
                state.with_whole_gradient.discard(param)

    def _reduce_with_others(self, group: GroupSizes, params: Sequence[ParamSizes]) -> None:
        joint = self._sets.get(group)
        if joint is None:
            self._reduce([(group, params)])
            return
        self._owed[joint][group] = params
        if all(each in self._owed[joint] or not any(p.is_trained for p in each.params) for each in joint.groups):
            self._reduce_owed(joint)

    def _reduce_owed(self, joint: SetSizes) -> None:
        owed, self._owed[joint] = self._owed[joint], {}
        alike: dict[object, list[tuple[GroupSizes, Sequence[ParamSizes]]]] = {}
        for group in joint.groups:
            if group in owed:
                alike.setdefault(group.reduces_as, []).append((group, owed[group]))
        for each in alike.values():
            self._reduce(each)

    def _reduce(self, owed: Sequence[tuple[GroupSizes, Sequence[ParamSizes]]]) -> None:
        trained_of = [(group, [param for param in params if param.is_trained]) for group, params in owed]
        parts: list[tuple[GroupSizes, Sequence[ParamSizes]]] = [(group, each) for group, each in trained_of if each]
        if not parts:
            return
        for group, trained in parts:
            self._keep_gradients(group, [each for each in trained if each in self._states[group].with_kept_gradient])
        self._finish_reductions(but_last_sum=True)
        every = [param for _, trained in parts for param in trained]
        packed_bytes, reduced_bytes = (
            sum(each.packed_bytes for each in every),
            sum(each.reduced_bytes for each in every),
        )
        self._add(PACKED, packed_bytes + reduced_bytes)
        forms = [[param.is_in_place for param in group.params] for group, _ in parts]
        num_in_place = sum(param.is_in_place for param in every) if len(parts) == 1 or reduces_in_place(forms) else 0
        num_collectives = num_in_place + (num_in_place < len(every))
        first, _ = parts[0]
        self._send("reduce_scatter", first.num_shards, packed_bytes, num_collectives)
        if first.num_replicas > 1:
            self._send("all_reduce", first.num_replicas, 2 * reduced_bytes)
        for group, trained in parts:
            state = self._states[group]
            self._drop(WHOLE_GRADIENTS, sum(each.whole_bytes for each in state.with_whole_gradient & {*trained}))
            self._drop(WHOLE_GRADIENTS, sum(each.kept_bytes for each in state.with_kept_gradient & {*trained}))
            state.with_whole_gradient.difference_update(trained)
            state.with_kept_gradient.difference_update(trained)
        self._reducing.append(_Reduction(parts, packed_bytes, first.num_replicas > 1))

    def _finish_reductions(self, *, but_last_sum: bool = False) -> None:
        goes_on = but_last_sum and bool(self._reducing) and self._reducing[-1].has_sum
        if goes_on:
            self._let_go_of_input(self._reducing[-1])
        while len(self._reducing) > goes_on:
            first = self._reducing.pop(0)
            for group, trained in reversed(first.parts):
                self._finish_reduction(group, trained)
            self._let_go_of_input(first)

    def _let_go_of_input(self, reduction: _Reduction) -> None:
        self._drop(PACKED, reduction.packed_bytes)
        reduction.packed_bytes = 0

    def _finish_reduction(self, group: GroupSizes, trained: Sequence[ParamSizes]) -> None:
        reduced_bytes = sum(param.reduced_bytes for param in trained)
        gradient_bytes = sum(param.gradient_bytes for param in trained)
        if reduced_bytes == gradient_bytes:
            self._drop(PACKED, reduced_bytes)
        self._add(REDUCED, gradient_bytes)
        if reduced_bytes != gradient_bytes:
            self._drop(PACKED, reduced_bytes)
        if group.is_offloaded:
            if not self._has_streams:
                self._add(REDUCED, gradient_bytes)
            self._drop(REDUCED, gradient_bytes)
        elif self._states[group].with_gradient.issuperset(trained):
            # Added to those of the last microbatch, in place.
            self._drop(REDUCED, gradient_bytes)
        self._states[group].with_gradient.update(trained)

    def _send(self, operation: str, num_ranks: int, num_bytes: int, num_collectives: int = 1) -> None:
        """In a ring each rank hands on all that passes it but one rank's part."""
        self.messages[Message(operation, num_ranks, num_bytes * (num_ranks - 1) // num_ranks, num_collectives)] += 1

    def _add(self, kind: str, num_bytes: int) -> None:
        self._memory[kind] += num_bytes
        self._total += num_bytes
        if self._total > self.peak.num_bytes:
            self.peak = Peak(self._when, dict(self._memory))

    def _drop(self, kind: str, num_bytes: int) -> None:
        self._memory[kind] -= num_bytes
        self._total -= num_bytes


def _joint_bytes(groups: Sequence[GroupSizes]) -> int:
    """What a rank gives to one gather of all of them: where dtypes differ, each begins where any dtype may."""
    step = 1 if len({group.gathered_as for group in groups}) == 1 else ALIGNMENT_BYTES
    return sum(-(-group.sent_bytes // step) * step for group in groups)
