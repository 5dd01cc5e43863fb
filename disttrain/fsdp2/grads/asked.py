"""Gradients that are asked for by name: `torch.autograd.grad(loss, model.parameters())`, `loss.backward(inputs=...)`.

The graph has the gathered parameters, not the shards. So gradients of the gathered ones are requested instead. What
`backward` accumulates is reduced as usual. What `grad` returns is reduced separately from existing gradients, and has
the form of `parameter.grad`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import (
    is_batched,
    is_transformed,
    out_of_graphs,
    without_post_accumulate_hooks,
    wrap_engine_calls,
)
from disttrain.fsdp2.faults.lone_errors import tell_of
from disttrain.fsdp2.params.param import ShardedParam, is_shard

if TYPE_CHECKING:
    from disttrain.fsdp2.params.param_group import ParamGroup
    from disttrain.fsdp2.root import RootContext, RootedState

_ROOTS: Final[weakref.WeakSet[RootedState]] = weakref.WeakSet()
"""Whose shards may be asked for."""
_MUTEX: Final = threading.Lock()
"""Ranks may be threads."""

_APART: Final = frozenset(["unreduced", "reduces_over_replicas", "has_taken_part", "reduces"])
"""The state of groups and units that is different while gradients are requested by name."""

Run = Callable[..., tuple[torch.Tensor | None, ...]]


def answer_for(root: RootedState) -> None:
    """From now on gradients of the shards below `root` are found when they are asked for, as long as it lives."""
    _watch_calls()
    with _MUTEX:
        _ROOTS.add(root)


@functools.cache
def _watch_calls() -> None:
    wrap_engine_calls(_run)


@out_of_graphs
def _run(run: Run, outputs: Sequence[Any], *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
    """A call of the autograd engine, as torch.autograd makes it."""
    grads, retains_graph, creates_graph, inputs, *rest = args
    if not any(map(is_shard, inputs)):
        return run(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
    request = _Asked(inputs)
    if accumulate_grad:
        everything = request.all_inputs
        return run(outputs, grads, retains_graph, creates_graph, everything, *rest, accumulate_grad=True, **kwargs)
    (allows_unused,) = rest
    if creates_graph or is_transformed() or any(map(is_batched, grads)):
        option = "create_graph=True" if creates_graph else "is_grads_batched=True"
        raise ShardingError(
            "grad",
            f"{option} would need the graph of gradients of sharded parameters, such as {request.names[0]}.",
            "Leave the module that needs them out of fully_shard.",
            rank=request.rank,
        )
    with request.apart():
        grads_of_inputs = run(outputs, grads, retains_graph, False, request.all_inputs, True, accumulate_grad=False)
        results = request.reduced(grads_of_inputs)
    if not allows_unused and any(result is None for result in results):
        request.refuse_unused(results)
    return results


class _Asked:
    """The gradients that one call of `torch.autograd.grad` asks for."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        context_of = {
            id(param.sharded): (param, context)
            for context in _contexts()
            for group in _groups(context)
            for param in group.params
        }
        known_inputs = [context_of.get(id(tensor), (None, None)) for tensor in inputs]
        self._params: list[ShardedParam | None] = [param for param, _ in known_inputs]
        # In the order of the arguments, since all ranks must reduce in one order.
        self._contexts = [*dict.fromkeys(context for _, context in known_inputs if context is not None)]
        sharded = {param: None for param in self._params if param is not None and param.is_trained}
        self._unsharded = {param: index for index, param in enumerate(sharded, len(inputs))}
        # Where a shard is in the graph itself, as in a penalty on weights, its own gradient comes by its side.
        self.all_inputs = (*inputs, *(param.unsharded for param in sharded))
        self.names = [param.fqn for param in self._params if param is not None] or ["one that never ran"]
        self._all_groups = [group for context in self._contexts for group in _groups(context)]
        self.rank = self._all_groups[0].sharding.mesh.get_rank() if self._all_groups else None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within it, the groups see no gradients but these."""
        for context in self._contexts:
            context.comm.finish_reductions()
            context.comm.finish_offload()
        params = [param for group in self._all_groups for param in group.params]
        units = [unit for context in self._contexts for unit in context.model.units]
        before = [
            (vars(each), {name: vars(each)[name] for name in _APART & vars(each).keys()})
            for each in (*self._all_groups, *(group.state for group in self._all_groups), *units)
        ]
        grads = [(param, param.sharded.grad, param.take_grad()) for param in params]
        for param in params:
            param.sharded.grad = None
        for group in self._all_groups:
            group.unreduced, group.state.reduces_over_replicas, group.state.has_taken_part = {}, True, False
        for unit in units:
            # What the engine finds is reduced when it has found all.
            unit.reduces = False
        try:
            with without_post_accumulate_hooks([param.sharded for param in params]):
                yield
        finally:
            for attributes, values in before:
                attributes.update(values)
            for param, grad, of_whole in grads:
                param.sharded.grad = grad
                param.put_grad(of_whole)

    def reduced(self, input_grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """From what the engine has found for `all_inputs`: what was asked for. Collective."""
        for param, index in self._unsharded.items():
            assert param.unsharded is not None
            param.unsharded.grad = input_grads[index]
        for context in self._contexts:
            context.run(context.model.reduce_what_is_left())
            context.comm.finish_reductions()
            context.comm.finish_offload()
            context.comm.several_grads.call_hooks()
        return tuple(_sum_of(param, input_grad) for param, input_grad in zip(self._params, input_grads, strict=False))

    def refuse_unused(self, results: Sequence[torch.Tensor | None]) -> None:
        """Raise ShardingError: for some there is no gradient."""
        names = [
            f"input {index}" if param is None else f"parameter {param.fqn}"
            for index, (param, result) in enumerate(zip(self._params, results, strict=True))
            if result is None
        ]
        error = ShardingError(
            "grad",
            f"{', '.join(names[:3])} has not been used for the outputs.",
            "Leave it out, or say allow_unused=True, for None in its place.",
            rank=self.rank,
        )
        tell_of("grad", error, self._all_groups)
        raise error


def _sum_of(param: ShardedParam | None, input_grad: torch.Tensor | None) -> torch.Tensor | None:
    """The reduced gradient, and that which the graph has for the shard itself."""
    grad = None if param is None else param.sharded.grad
    if param is None or grad is None:
        return input_grad
    if input_grad is None:
        return grad
    assert isinstance(input_grad, DTensor)
    return grad + input_grad.redistribute(placements=param.spec.placements)


def _contexts() -> list[RootContext]:
    with _MUTEX:
        roots = [*_ROOTS]
    return [root.context for root in roots if root.context is not None and root.context.root is root]


def _groups(context: RootContext) -> list[ParamGroup]:
    return [group for state in context.states for group in state.groups]
