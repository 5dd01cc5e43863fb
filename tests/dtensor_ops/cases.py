"""Which calls of an operator are tried: samples of its OpInfo, variants, meshes and placements of the operands."""

from __future__ import annotations

import itertools
import math
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from disttrain.dtensor import Partial, Placement, Replicate, Shard

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2), (1, 3), (2, 1), (1, 1, 2))
MAX_SAMPLES = 4
MAX_ELEMENTS = 16384
DTYPES = (
    torch.float64,
    torch.complex128,
    torch.int64,
    torch.bool,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
)

# Placements by tensor: a function of the tensor's place among the operands and of its number of dims.
Assignment = tuple[tuple[Placement, ...], ...]


@dataclass(frozen=True)
class Call:
    """One way to call an operator on a sample. `kind` is "function", "in-place" or "out="."""

    kind: str
    function: Callable[..., Any]
    sample: SampleInput
    needs_grad: bool

    @property
    def values(self) -> tuple[Any, Any, Any]:
        return self.sample.input, self.sample.args, self.sample.kwargs

    @property
    def operands(self) -> list[torch.Tensor]:
        return distinct_tensors(self.values)


@dataclass(frozen=True)
class Case:
    """A call, and for each of its operands a placement per mesh axis."""

    call: Call
    placements: Assignment

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.call.operands)
        return f"{self.call.kind} of {shapes} as {[list(one) for one in self.placements]}"


def distinct_tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in a nest of values, each once."""
    return list({id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}.values())


def with_tensors(values: Any, replacements: dict[int, Any]) -> Any:
    """The nest with its tensors replaced, by id."""
    return tree_map(lambda leaf: replacements[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf, values)


def calls_of(info: OpInfo) -> list[Call]:
    """Up to MAX_SAMPLES samples of the operator, as a function, in place and with `out=`."""
    dtype = next((dtype for dtype in DTYPES if dtype in info.dtypes), None)
    if dtype is None:
        return []
    needs_grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    samples = [sample for sample in info.sample_inputs("cpu", dtype, requires_grad=needs_grad) if _is_usable(sample)]
    samples = _spread(samples)
    # As a program writes it, so that a subclass's own method is called.
    function = operator.getitem if info.op is torch.Tensor.__getitem__ else info.op
    calls = [Call("function", function, sample, needs_grad) for sample in samples]
    if info.inplace_variant is not None:
        calls += [Call("in-place", info.inplace_variant, sample, False) for sample in samples[:2]]
    if info.supports_out:
        calls += [Call("out=", info.op, sample, False) for sample in samples[:2]]
    return calls


def _is_usable(sample: SampleInput) -> bool:
    tensors = distinct_tensors((sample.input, sample.args, sample.kwargs))
    return all(
        type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() <= MAX_ELEMENTS
        for tensor in tensors
    )


def _spread(samples: Sequence[SampleInput]) -> list[SampleInput]:
    """Few samples that differ: one of each shape of operands, the small ones and some across the rest."""
    by_shape: dict[Any, SampleInput] = {}
    for sample in samples:
        tensors = distinct_tensors((sample.input, sample.args, sample.kwargs))
        by_shape.setdefault(tuple(tuple(tensor.shape) for tensor in tensors), sample)
    chosen = list(by_shape.values())
    if len(chosen) < MAX_SAMPLES:  # the same shapes with other arguments
        chosen += [sample for sample in samples if all(sample is not other for other in chosen)]
    if len(chosen) <= MAX_SAMPLES:
        return chosen
    return [chosen[place * (len(chosen) - 1) // (MAX_SAMPLES - 1)] for place in range(MAX_SAMPLES)]


def cases_of(call: Call, mesh_shape: tuple[int, ...]) -> Iterator[Case]:
    """The call with all operands alike, one operand apart, and some placements drawn at random."""
    operands = call.operands
    choices = [_choices(tensor) for tensor in operands]
    assignments = _axis_assignments(choices)
    limit = {"function": 10, "in-place": 6, "out=": 3}[call.kind] // (1 if mesh_shape == (2,) else 3)
    if len(mesh_shape) == 1:
        picked = [tuple((place,) for place in one) for one in assignments]
    else:
        draw = random.Random(0)
        rows = [[draw.choice(assignments) for _ in mesh_shape] for _ in range(4 * limit)]
        picked = [tuple(zip(*row, strict=True)) for row in rows]
    if 1 in mesh_shape:
        picked = [*(_crossed(operands, mesh_shape, first) for first in (0, 1)), *picked]
    for assignment in list(dict.fromkeys(picked))[:limit]:
        yield Case(call, assignment)


def _crossed(operands: Sequence[torch.Tensor], mesh_shape: tuple[int, ...], first: int) -> Assignment:
    """Every axis cuts another dim: what is right along an axis of one rank must not be taken to be so along all."""
    return tuple(
        tuple(Shard((first + axis) % tensor.ndim) if tensor.ndim else Replicate() for axis in range(len(mesh_shape)))
        for tensor in operands
    )


def _choices(tensor: torch.Tensor) -> list[Placement]:
    """All placements of a tensor along one axis. A bool, or what has 8 bits, has no parts that add up."""
    shards: list[Placement] = [Shard(dim) for dim in range(tensor.ndim)]
    partial: list[Placement] = [Partial()] if can_be_added(tensor.dtype) else []
    return [*shards, *partial, Replicate()]


def can_be_added(dtype: torch.dtype) -> bool:
    return dtype != torch.bool and not (dtype.is_floating_point and dtype.itemsize == 1)


def _axis_assignments(choices: Sequence[Sequence[Placement]]) -> list[tuple[Placement, ...]]:
    """Placements of all operands along one axis, the telling ones first."""
    if not choices:
        return [()]
    widest = max(len(own) for own in choices)
    alike = [tuple(own[min(place, len(own) - 1)] for own in choices) for place in range(widest)]
    partial = [tuple(own[-2] if Partial() in own else own[-1] for own in choices)]
    whole: tuple[Placement, ...] = tuple(Replicate() for _ in choices)
    apart = [
        (*whole[:place], placement, *whole[place + 1 :])
        for place, own in enumerate(choices)
        for placement in own
        if len(choices) > 1
    ]
    draw = random.Random(len(choices))
    draw.shuffle(apart)
    mixed = [tuple(draw.choice(own) for own in choices) for _ in range(6)]
    return list(dict.fromkeys([*alike, *partial, *itertools.chain(*zip(apart, mixed, strict=False)), *mixed, *apart]))


def plain_result(call: Call) -> tuple[Any, Any, list[torch.Tensor] | None] | None:
    """(result, operands afterwards, gradients) of the call on plain tensors; None where torch refuses it."""
    copies = _copies(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        try:
            result, grads = run_call(call, copies, None)
            if call.kind == "out=":
                run_call(call, _copies(call), tree_map(torch.zeros_like, result))
        except Exception:  # noqa: BLE001 -- whatever torch refuses is no case
            return None
    if call.kind == "in-place" and isinstance(result, torch.Tensor) and result.shape != call.sample.input.shape:
        return None  # some let a tensor of one element grow
    if any(leaf.layout != torch.strided for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
        return None
    return detached(result), [copies[id(tensor)].detach() for tensor in call.operands], grads


def _copies(call: Call) -> dict[int, Any]:
    return {
        id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad and call.needs_grad)
        for tensor in call.operands
    }


def detached(values: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, values)


def run_call(call: Call, operands: dict[int, Any], out: Any) -> tuple[Any, list[torch.Tensor | None] | None]:
    """The call with its operands replaced; with its gradients for all that require one."""
    first, args, kwargs = with_tensors(call.values, operands)
    if call.kind == "out=" and out is not None:
        kwargs = {**kwargs, "out": out}
    result = call.function(first, *args, **kwargs)
    if not call.needs_grad:
        return result, None
    processed = call.sample.output_process_fn_grad(result)
    outputs = [leaf for leaf in tree_leaves(processed) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    inputs = [tensor for tensor in operands.values() if tensor.requires_grad]
    if not outputs or not inputs:
        return result, None
    # The outputs themselves as weights: each element counts differently, and it lies as the output does.
    weights = [_weights(output.detach()) if output.numel() else output.detach() for output in outputs]
    return result, list(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))


def _weights(output: torch.Tensor) -> torch.Tensor:
    wide = output.to(torch.complex64) if output.dtype == torch.complex32 else output
    return (wide * 0.5).cos().to(output.dtype)


def num_parts(mesh_shape: Sequence[int]) -> int:
    return math.prod(mesh_shape)
