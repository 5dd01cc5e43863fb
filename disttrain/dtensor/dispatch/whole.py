"""Operators on whole tensors: right for all of them, at the price of gathering every operand on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor._torch import OpFacts, OpOverload, become
from disttrain.dtensor.dispatch.call_plan import Wrap, redistributing, replaced, written_tensors
from disttrain.dtensor.dispatch.implicit import may_gather
from disttrain.dtensor.draws import draw_part
from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.rules import OpCall
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.shard_sizes import is_permuted
from disttrain.dtensor.views.counted_places import check_begins_there, counts_from_start
from disttrain.dtensor.views.view_copy import ViewCopy, count_writes
from disttrain.errors import LayoutError

_DRAWN = frozenset({"aten.normal_", "aten.uniform_"})
"""Random operators that read no values and need not draw all numbers at once."""


def values_of(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors, with the values of DTensors, which are all scalars. Collective over their meshes, once for DTensors
    with the same layout."""
    values = list(tensors)
    alike: dict[tuple[Layout, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        spec: Spec | None = getattr(tensor, "_spec", None)
        if spec is not None:
            alike.setdefault((spec.layout, spec.dtype), []).append(index)
    for (layout, dtype), indices in alike.items():
        stacked = torch.stack([tensors[index]._local_tensor for index in indices])
        whole = redistribute_local(stacked, Spec.of(layout, (len(indices),), dtype), layout.replicated())
        for index, value in zip(indices, whole.unbind(0), strict=True):
            values[index] = value
    return values


def run_whole(wrap: Wrap, op: OpOverload, call: OpCall, tensors: Sequence[Any]) -> Any:
    """Gathers all operands and computes on every rank. Results stay whole; operands that are written to return to their
    layouts. Where parts are enough to fill an `out=`, nothing is gathered."""
    out = call.keywords.get("out") if call.facts.is_pointwise else None
    return _run_gathered(wrap, op, call, tensors) if out is None or not _put_parts(op, call, out) else out


def _run_gathered(wrap: Wrap, op: OpOverload, call: OpCall, tensors: Sequence[Any]) -> Any:
    specs = [spec for spec in call.operands if spec is not None]
    layout = specs[0].layout.replicated()
    if call.facts.name in _DRAWN and call.operands[0] is not None and len(specs) == 1:
        return _drawn(op, call, tensors[0], call.operands[0])
    if counts_from_start(call.facts, call.arguments, call.keywords) and call.operands[0] is not None:
        check_begins_there(call.facts.name, tensors[0]._local_tensor, call.operands[0])
    if call.facts.changes_shape:
        return _resized(call.facts, specs[0], call.arguments)
    if not all(spec.layout.is_replicated for spec in specs):
        _check_may_gather(call.facts, specs[0])
        if call.facts.is_view:
            return _view_of_whole(wrap, op, call, tensors[0], specs[0])
    written = {id(tensor) for tensor in written_tensors(call.facts, call.arguments, call.keywords)}
    if -1 in call.facts.mutated:
        _check_shares(call.facts, [tensor for tensor in tensors if id(tensor) in written], specs[0])
    # Random numbers ignore what was there: nothing needs to be gathered for them.
    overwrites = call.facts.is_random and (call.facts.is_inplace or call.facts.name.endswith("_like"))
    # An operand that is given twice is one tensor, also as a whole.
    wholes: dict[int, torch.Tensor] = {}
    for index, (tensor, spec) in enumerate(zip(tensors, call.operands, strict=True)):
        if spec is not None and id(tensor) not in wholes:
            wholes[id(tensor)] = _whole(
                tensor, spec, skips_values=overwrites and index == 0, is_written=id(tensor) in written
            )
    args, kwargs = replaced(call.arguments, call.keywords, [wholes.get(id(tensor), tensor) for tensor in tensors])
    result = op(*args, **kwargs)
    for tensor, spec in zip(tensors, call.operands, strict=True):
        if spec is not None and id(tensor) in written:
            _write_back(wrap, call.facts, tensor, spec, wholes[id(tensor)])
    if -1 in call.facts.mutated and torch.is_inference_mode_enabled():
        count_writes([tensor for tensor in tensors if id(tensor) in written])  # torch does so in other modes alone
    stand_ins = {id(wholes.get(id(tensor), tensor)): tensor for tensor in tensors if id(tensor) in written}
    return _wrapped_wholes(wrap, call.facts, result, layout, stand_ins)


def _put_parts(op: OpOverload, call: OpCall, out: Any) -> bool:
    """Computes on parts, and copies them into `out`, where it is a DTensor that the result fits: optimizers write so to
    their averages. False where the whole is needed for it."""
    out_spec: Spec | None = getattr(out, "_spec", None)
    if (
        out_spec is None
        or hasattr(out, "_stands_apart")
        or out_spec.layout.is_replicated
        or out_spec.layout.has_partial
    ):
        return False
    keywords = {name: value for name, value in call.keywords.items() if name != "out"}
    values = [value for value in (*call.arguments, *keywords.values()) if isinstance(value, torch.Tensor)]
    fits = all(spec is not None for spec in call.operands) and out_spec.shape == torch.broadcast_shapes(
        *[value.shape for value in values]
    )
    if not fits or any(value.dtype != out.dtype for value in values):
        return False
    result = op.overloadpacket(*call.arguments, **keywords)
    if result.dtype != out.dtype:
        return False
    out.copy_(result)
    if torch.is_inference_mode_enabled():
        count_writes([out])
    return True


def _resized(facts: OpFacts, spec: Spec, args: tuple[Any, ...]) -> Any:
    """The tensor itself, for a resize to the size that it has."""
    size = args[1] if facts.name == "aten.resize_" else args[1].shape if facts.name == "aten.resize_as_" else None
    if size is not None and tuple(size) == spec.shape:
        return args[0]
    raise LayoutError(
        facts.name,
        "it would give a DTensor other memory, or a plain tensor a DTensor's.",
        "Make a new tensor of the new shape.",
        rank=spec.mesh.world.rank,
    )


def _view_of_whole(wrap: Wrap, op: OpOverload, call: OpCall, tensor: Any, spec: Spec) -> Any:
    """A view, as a copy from the whole."""
    layout = spec.layout.replicated()

    view_copy = ViewCopy(tensor, redistributing(spec, layout))

    def copied(part: torch.Tensor, spec: Spec) -> torch.Tensor:
        with torch.inference_mode(mode=tensor.is_inference()):
            return wrap(part, spec.as_view_copy(view_copy))

    args, kwargs = replaced(call.arguments, call.keywords, [view_copy.moved])
    return _wrapped_wholes(copied, call.facts, op(*args, **kwargs), layout, {})


def _drawn(op: OpOverload, call: OpCall, tensor: Any, spec: Spec) -> Any:
    """Fill a part with its numbers of the whole."""
    others, keywords = call.arguments[1:], call.keywords
    part = draw_part(lambda whole: op(whole, *others, **keywords), spec, tensor._local_tensor.device)
    tensor._local_tensor.copy_(part)
    return tensor


def _whole(tensor: Any, spec: Spec, *, skips_values: bool, is_written: bool) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor
    if spec.layout.is_replicated:
        # Under another name: an operator may resize what it writes to.
        return local.view_as(local) if is_written else local
    if skips_values:
        return local.new_empty(spec.shape)
    whole = redistribute_local(local, spec, spec.layout.replicated())
    if tuple(whole.stride()) == spec.stride or spec.is_symbolic or not is_permuted(spec.shape, spec.stride):
        return whole
    # Some operators require an order of dims in memory, and others keep the order of their operand.
    return whole.new_empty_strided(spec.shape, spec.stride).copy_(whole)


def _write_back(wrap: Wrap, facts: OpFacts, tensor: Any, spec: Spec, whole: torch.Tensor) -> None:
    layout = spec.layout.replicated()
    if tuple(whole.shape) != spec.shape and 0 in spec.shape and -1 in facts.mutated:
        # An empty `out` takes the size of the result.
        tensor._local_tensor = whole
        tensor._spec = Spec(layout, tuple(whole.shape), tuple(whole.stride()), whole.dtype)
        become(tensor, wrap(whole, tensor._spec))
        return
    if tuple(whole.shape) != spec.shape:
        raise LayoutError(
            facts.name,
            f"the result of shape {tuple(whole.shape)} does not fit into a DTensor of shape {spec.shape}.",
            "Give a DTensor of the result's shape to write to.",
            rank=spec.mesh.world.rank,
        )
    if not spec.layout.is_replicated:
        tensor._local_tensor.copy_(redistribute_local(whole, spec.with_layout(layout), spec.layout))
    elif whole.data_ptr() != tensor._local_tensor.data_ptr():
        tensor._local_tensor.copy_(whole)


def _check_shares(facts: OpFacts, outs: Sequence[torch.Tensor], spec: Spec) -> None:
    # Some of torch's `out=` forms write to an `_unsafe_view` of `out`, as though it were a view.
    if any(hasattr(out, "_stands_apart") for out in outs):
        raise LayoutError(
            facts.name,
            "out= is a reshaped copy of a tensor that lies on other ranks; the write would be lost.",
            "Use the operator without out=, or redistribute out to Replicate() first.",
            rank=spec.mesh.world.rank,
        )


def _check_may_gather(facts: OpFacts, spec: Spec) -> None:
    if not may_gather(spec.mesh.world):
        raise LayoutError(
            facts.name,
            "it has no sharding rule, and implicit_replication(False) forbids to gather its operands.",
            "Redistribute them to Replicate(), register_sharding for it, or leave implicit_replication(False).",
            rank=spec.mesh.world.rank,
        )
    if not (facts.is_random or facts.returns_data):
        warnings.warn(
            f"disttrain.dtensor: {facts.name} has no sharding rule; its operands are gathered on every rank",
            stacklevel=2,
        )


def _wrapped_wholes(wrap: Wrap, facts: OpFacts, result: Any, layout: Layout, stand_ins: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        if id(result) in stand_ins:
            return stand_ins[id(result)]
        if result.layout is not torch.strided:
            raise LayoutError(
                facts.name,
                f"its result is {result.layout}; a DTensor's parts are strided.",
                "Call it on full_tensor(), or on to_local().",
                rank=layout.mesh.world.rank,
            )
        return wrap(result, Spec(layout, tuple(result.shape), tuple(result.stride()), result.dtype))
    if isinstance(result, list | tuple):
        return type(result)(_wrapped_wholes(wrap, facts, item, layout, stand_ins) for item in result)
    return result
