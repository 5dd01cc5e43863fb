"""A step of training gone through without tensors: what is allocated when, and what is sent. Pure.

Follows `state.py` and `param_group.py` event by event, for modules that run in the order in which they are registered,
from the second step on, when that order has been learnt. Activations are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

WHOLE, WHOLE_GRADIENTS = "whole parameters", "whole gradients"
PACKED, REDUCED, GATHERED = "packed gradients", "reduced gradients", "being gathered, or kept for it"


@dataclass(frozen=True, eq=False)
class ParamSizes:
    """Bytes of one parameter: whole, its gradient as it is kept from microbatch to microbatch, for all ranks as it is
    reduced, this rank's part of that, and of the gradient."""

    whole_bytes: int
    kept_bytes: int
    packed_bytes: int
    reduced_bytes: int
    gradient_bytes: int
    is_trained: bool
    num_uses: int
    """Modules that have it."""


@dataclass(frozen=True, eq=False)
class GroupSizes:
    """Bytes of what is gathered together, and over how many ranks."""

    params: tuple[ParamSizes, ...]
    early_parts: tuple[tuple[ParamSizes, ...], ...]
    """What of a root is reduced as soon as its gradients are there; fewer than two: nothing is."""
    shard_bytes: int
    sent_bytes: int
    """The shard in the dtype to compute in, or what parameters say themselves is gathered of it."""
    whole_bytes: int
    num_shards: int
    num_replicas: int
    cast_bytes: int
    """Made of the shard before it is sent."""
    is_gathered_in_place: bool
    is_offloaded: bool


Use = tuple[GroupSizes, ParamSizes]


@dataclass(eq=False)
class SizedModule:
    """A sharded module: what its forward comes across, in order, and what is gathered when."""

    name: str
    groups: list[GroupSizes]
    body: list[SizedModule | Use] = field(default_factory=list)
    frees_after_forward: bool = True
    kept_on: int | None = None
    gathers_in_backward: bool = True
    forward_prefetch: list[SizedModule] | None = None
    backward_prefetch: list[SizedModule] | None = None


@dataclass(frozen=True)
class Peak:
    """The largest sum of what comes and goes during a step: `when`, and bytes by kind."""

    when: str
    by_kind: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """All kinds together."""
        return sum(self.by_kind.values())


@dataclass(frozen=True, order=True)
class Message:
    """One collective: how many ranks take part, and how many bytes each of them sends round a ring."""

    operation: str
    num_ranks: int
    sent_bytes: int


class _GroupState:
    """Where the rehearsal is with one group: what is whole, what is on its way, which gradients are there."""

    def __init__(self) -> None:
        self.is_gathering = False
        self.is_whole = False
        self.kept: tuple[int, int] | None = None
        self.held_while_gathering: int | None = None
        self.uses_seen: Counter[ParamSizes] = Counter()
        self.reduced: set[ParamSizes] = set()
        self.with_whole_gradient: set[ParamSizes] = set()
        self.with_kept_gradient: set[ParamSizes] = set()
        self.with_gradient: set[ParamSizes] = set()


class Rehearsal:
    """A step of `root`; `has_streams` on CUDA, where a transport writes gathered values into their places."""

    def __init__(self, root: SizedModule, *, has_streams: bool) -> None:
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
        self._reducing: tuple[GroupSizes, Sequence[ParamSizes]] | None = None
        self._learn(root)

    def run(self, num_microbatches: int, *, reduces_each: bool) -> None:
        """Go through the step; `peak` and `messages` have what it takes. Gradients are reduced after each microbatch,
        or after the last."""
        for microbatch in range(num_microbatches):
            self._reduces = reduces_each or microbatch + 1 == num_microbatches
            self._forward(self._root)
            self._backward(self._root)
            self._finish_reduction()
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
                self._reduce(group, [param for param in group.params if param not in done])
            else:
                self._keep_gradients(group, [param for param in group.params if param.kept_bytes != param.whole_bytes])

    def _neighbour(self, module: SizedModule, step: int) -> list[SizedModule]:
        place = self._order.index(module) + step
        return [self._order[place]] if 0 <= place < len(self._order) else []

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
        if state.is_whole or state.is_gathering:
            return
        state.is_gathering = True
        in_place = self._has_streams and state.kept is None and group.is_gathered_in_place
        if in_place:
            self._add(WHOLE, group.whole_bytes)
        else:
            self._release_gathered()
        was_kept = state.kept is not None
        if state.kept is None:
            num_ranks, held = group.num_shards, 0
            if group.is_offloaded and self._has_streams:
                held += group.shard_bytes
            held += group.cast_bytes
            self._add(GATHERED, held)
        else:
            (num_ranks, held), state.kept = state.kept, None
        if not in_place:
            self._add(GATHERED, group.sent_bytes * group.num_shards)
            state.held_while_gathering = 0
        self._send("all_gather", num_ranks, group.sent_bytes * group.num_shards)
        if self._has_streams and not was_kept:
            self._drop(GATHERED, held)
        else:
            # What a transport reads, or a stream that is not its owner, is there until it has been waited for.
            state.held_while_gathering = held

    def _end_gather(self, group: GroupSizes) -> None:
        state = self._states[group]
        if not state.is_gathering:
            return
        state.is_gathering, state.is_whole = False, True
        if state.held_while_gathering is not None:
            self._add(WHOLE, group.whole_bytes)
            self._drop(GATHERED, state.held_while_gathering)
            state.held_while_gathering = None
            self._release_gathered()
            self._copied_out = group.sent_bytes * group.num_shards

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
                    self._reduce(group, part)

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

    def _reduce(self, group: GroupSizes, params: Sequence[ParamSizes]) -> None:
        trained = [param for param in params if param.is_trained]
        if not trained:
            return
        state = self._states[group]
        self._keep_gradients(group, [param for param in trained if param in state.with_kept_gradient])
        self._finish_reduction()
        packed_bytes = sum(param.packed_bytes for param in trained)
        reduced_bytes = sum(param.reduced_bytes for param in trained)
        self._add(PACKED, packed_bytes + reduced_bytes)
        self._send("reduce_scatter", group.num_shards, packed_bytes)
        if group.num_replicas > 1:
            self._send("all_reduce", group.num_replicas, 2 * reduced_bytes)
        self._drop(WHOLE_GRADIENTS, sum(param.whole_bytes for param in state.with_whole_gradient.intersection(trained)))
        self._drop(WHOLE_GRADIENTS, sum(param.kept_bytes for param in state.with_kept_gradient.intersection(trained)))
        state.with_whole_gradient.difference_update(trained)
        state.with_kept_gradient.difference_update(trained)
        self._reducing = group, trained

    def _finish_reduction(self) -> None:
        if self._reducing is None:
            return
        (group, trained), self._reducing = self._reducing, None
        packed_bytes, reduced_bytes, gradient_bytes = (
            sum(sizes)
            for sizes in zip(*((p.packed_bytes, p.reduced_bytes, p.gradient_bytes) for p in trained), strict=True)
        )
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
        self._drop(PACKED, packed_bytes)

    def _send(self, operation: str, num_ranks: int, num_bytes: int) -> None:
        """In a ring each rank hands on all that passes it but one rank's part."""
        self.messages[Message(operation, num_ranks, num_bytes * (num_ranks - 1) // num_ranks)] += 1

    def _add(self, kind: str, num_bytes: int) -> None:
        self._memory[kind] += num_bytes
        self._total += num_bytes
        if self._total > self.peak.num_bytes:
            self.peak = Peak(self._when, dict(self._memory))

    def _drop(self, kind: str, num_bytes: int) -> None:
        self._memory[kind] -= num_bytes
        self._total -= num_bytes
