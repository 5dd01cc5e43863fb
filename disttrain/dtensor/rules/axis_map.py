"""Operators described by a letter for each dim of operands and results, as einsum's equations are.

From the letters follow the signatures: a letter that is cut cuts the dims that bear it; an operand without it is whole;
a result without it is a sum of the ranks' terms, if anything it is computed from bears the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

import torch

from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Signature, all_replicated, result_specs
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.placement import Partial, Placement, Replicate, Shard

UNCUT = "."
"""In place of a letter: a dim that is never cut, or that is broadcast."""

BATCH_LETTERS = ascii_uppercase
"""For leading dims, whose number the operands decide."""

_SUM = Partial("sum")


@dataclass(frozen=True)
class AxisMap:
    """The dims of one call, a letter each, as in einsum.

    `operands` has the letters of each tensor operand by the argument's name; `results` those of each result; `cut` are
    the letters that may be cut. Operands in `added` are added to the result, each rank its term. The results are linear
    in the operands of each group in `linear` together, the others fixed. `sources` names the operands that each result
    is computed from; left out, it is all of them.
    """

    operands: Mapping[str, str]
    results: tuple[str, ...]
    cut: Iterable[str]
    added: frozenset[str] = frozenset()
    linear: tuple[frozenset[str], ...] = ()
    sources: tuple[frozenset[str], ...] | None = None


def signatures_of(describe: Callable[[OpCall], AxisMap | None]) -> Callable[[OpCall], Sequence[Signature]]:
    """The signatures by the map that `describe` draws of a call; None: only whole operands will do."""

    def signatures(call: OpCall) -> Sequence[Signature]:
        axis_map = describe(call)
        if axis_map is None:
            return [all_replicated(call)]
        names = operand_names(call)
        if any(spec is None and name in axis_map.added for name, spec in zip(names, call.operands, strict=True)):
            return [all_replicated(call)]  # a plain scalar has no terms
        cuts = [_cut(axis_map, names, letter) for letter in axis_map.cut]
        return [all_replicated(call), *cuts, *_linear(axis_map, names, call)]

    return signatures


def _cut(axis_map: AxisMap, names: Sequence[str], letter: str) -> Signature:
    results = [_cut_result(axis_map, index, letters, letter) for index, letters in enumerate(axis_map.results)]

    def operand(name: str) -> Placement:
        letters = axis_map.operands.get(name, "")
        if letter in letters:
            return Shard(letters.index(letter))
        return _SUM if name in axis_map.added and _SUM in results else Replicate()

    return Signature.of([operand(name) for name in names], *results)


def _cut_result(axis_map: AxisMap, index: int, letters: str, letter: str) -> Placement:
    if letter in letters:
        return Shard(letters.index(letter))
    sources = axis_map.operands if axis_map.sources is None else axis_map.sources[index]
    return _SUM if any(letter in axis_map.operands.get(name, "") for name in sources) else Replicate()


def _linear(axis_map: AxisMap, names: Sequence[str], call: OpCall) -> Iterable[Signature]:
    for group in axis_map.linear:
        together = group & frozenset(names)
        # An average of terms is the average of what is linear in them, if nothing else is added.
        kinds = (_SUM,) if axis_map.added else (_SUM, Partial("avg"))
        if together and all(spec is not None for name, spec in zip(names, call.operands, strict=True) if name in group):
            for kind in kinds:
                operands: list[Placement] = [kind if name in together else Replicate() for name in names]
                yield Signature(tuple(operands), (kind,) * len(call.outputs))


def operand_names(call: OpCall) -> list[str]:
    """The argument's name of each tensor operand; for operators without lists of tensors."""
    positional = [
        call.facts.arguments[position]
        for position, value in enumerate(call.arguments)
        if isinstance(value, torch.Tensor)
    ]
    return positional + [name for name, value in call.keywords.items() if isinstance(value, torch.Tensor)]


def operand_called(call: OpCall, name: str) -> Spec | None:
    """The spec of the operand called `name`; None where it was not given, or is a plain scalar."""
    names = operand_names(call)
    return call.operands[names.index(name)] if name in names else None


def batch_letters(num_dims: int, num_core_dims: int) -> str:
    """Letters for a tensor whose last `num_core_dims` dims stay whole, counted from the left."""
    num_batch_dims = num_dims - num_core_dims
    return BATCH_LETTERS[:num_batch_dims] + UNCUT * num_core_dims


def aligned_letters(letters: str, shape: Sequence[int], whole_shape: Sequence[int]) -> str:
    """`letters` of the whole, for an operand of `shape` that is broadcast to it."""
    offset = len(whole_shape) - len(shape)
    return "".join(
        UNCUT if size == 1 and whole_shape[offset + dim] != 1 else letters[offset + dim]
        for dim, size in enumerate(shape)
    )


def local_spec(call: OpCall, propagation: Propagation, name: str) -> Spec | None:
    """The spec that the operand called `name` has when it is computed with; None where it is plain or left out."""
    names = operand_names(call)
    if name not in names:
        return None
    spec, layout = call.operands[names.index(name)], propagation.operands[names.index(name)]
    return None if spec is None or layout is None else spec.with_layout(layout)


def zeros_where_empty(call: OpCall, propagation: Propagation) -> Compute:
    """Zeros for a rank with an empty part, which many kernels refuse: it has no share in any sum."""
    return guarded(call, propagation, call.op)


def guarded(call: OpCall, propagation: Propagation, compute: Compute) -> Compute:
    """`compute`, or zeros in place of it on a rank that has nothing of a dim of which the whole has something."""
    for spec, layout in zip(call.operands, propagation.operands, strict=True):
        if spec is not None and layout is not None:
            local_shape = spec.with_layout(layout).local_shape
            if any(local_size == 0 and size > 0 for local_size, size in zip(local_shape, spec.shape, strict=True)):
                return zeros(call, propagation)
    return compute


def zeros(call: OpCall, propagation: Propagation) -> Compute:
    """Zeros of the results' shapes; nothing for gradients that nobody asked for, which have no shape."""
    specs = result_specs(call, propagation)
    is_wanted = call.argument("output_mask", (True,) * len(specs))

    def run(*args: Any, **kwargs: Any) -> Any:
        like = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        parts = [
            like.new_zeros(spec.local_shape, dtype=spec.dtype) if wanted else None
            for spec, wanted in zip(specs, is_wanted, strict=True)
        ]
        return parts[0] if len(parts) == 1 else tuple(parts)

    return run


def with_arguments(call: OpCall, changed: Mapping[str, Any]) -> Compute:
    """The operator with other values for the arguments called so, such as a size of the part for that of the whole."""
    positions = {
        call.facts.arguments.index(name): value for name, value in changed.items() if name not in call.keywords
    }
    keywords = {name: value for name, value in changed.items() if name in call.keywords}

    def run(*args: Any, **kwargs: Any) -> Any:
        replaced = [positions.get(position, value) for position, value in enumerate(args)]
        return call.op(*replaced, **{**kwargs, **keywords})

    return run
