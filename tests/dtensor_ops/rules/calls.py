"""Calls of aten operators, as the samples of an OpInfo make them, forward and backward."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.dispatch import dispatch
from disttrain.dtensor.dispatch.call_plan import replaced, tensors_of
from tests.dtensor_ops.cases import calls_of, run_call

MAX_ELEMENTS = 4096
MAX_CALLS = 6
_NOT_JUDGED = ("aten._foreach", "aten.empty", "aten.new_empty")
"""Lists of tensors, which no rule takes, and memory that is not set."""


@dataclass(frozen=True)
class AtenCall:
    """One call of an operator, with the values it was given and what it returned."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]

    @property
    def operands(self) -> list[torch.Tensor]:
        return tensors_of([*self.args, *self.kwargs.values()])

    def run(self, operands: Sequence[torch.Tensor], compute: Any = None) -> tuple[Any, ...]:
        """The results of the same call with other operands, by the operator or in place of it by `compute`."""
        args, kwargs = replaced(self.args, self.kwargs, operands)
        return as_tuple((compute or self.op)(*args, **kwargs))

    def with_operands(self, operands: Sequence[torch.Tensor]) -> AtenCall:
        args, kwargs = replaced(self.args, self.kwargs, operands)
        results = self.run([operand.clone() for operand in operands])
        return AtenCall(self.op, tuple(args), kwargs, results)

    def __str__(self) -> str:
        shapes = ", ".join(f"{operand.dtype}{list(operand.shape)}".removeprefix("torch.") for operand in self.operands)
        others = [repr(value) for value in self.args if not tensors_of([value])]
        others += [f"{name}={value}" for name, value in self.kwargs.items() if not tensors_of([value])]
        return f"{self.op} of {shapes} ({', '.join(others)})"


def as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, list | tuple) else (results,)


class _Captures(TorchDispatchMode):
    """Keeps all calls, with copies of the values: what is written to is kept as it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AtenCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept_args, kept_kwargs = tree_map(_copy, (args, kwargs or {}))
        results = func(*args, **(kwargs or {}))
        self.calls.append(AtenCall(func, kept_args, kept_kwargs, tuple(map(_copy, as_tuple(results)))))
        return results


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def aten_calls_of(info: OpInfo, seen: Counter[str], max_calls: int = MAX_CALLS) -> Iterator[AtenCall]:
    """The calls that running the OpInfo's samples, and their gradients, comes down to, but for those `seen`.

    Of one operator there are `max_calls` at most: what all gradients come down to need not be judged with all of them.
    """
    for call in calls_of(info):
        if call.kind == "out=":
            continue
        copies: dict[int, Any] = {
            id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad and call.needs_grad)
            for tensor in call.operands
        }
        with warnings.catch_warnings(), _Captures() as captured:
            warnings.simplefilter("ignore")
            try:
                run_call(call, copies, None)
            except Exception:  # noqa: BLE001 -- whatever torch refuses is no case
                continue
        for found in captured.calls:
            if not seen[str(found)] and seen[str(found.op)] < max_calls and _can_be_judged(found):
                seen.update([str(found), str(found.op)])
                yield found


def _can_be_judged(call: AtenCall) -> bool:
    facts = dispatch.facts(call.op)
    tensors = call.operands
    results = [leaf for leaf in tree_leaves(call.results) if isinstance(leaf, torch.Tensor)]
    return (
        bool(tensors and results)
        and not (facts.is_inplace and results[0].shape != tensors[0].shape)  # some let a tensor of one element grow
        and not (facts.is_random or facts.changes_shape or facts.name.startswith(_NOT_JUDGED))
        and dispatch._can_be_planned(facts)
        and all(type(tensor) is torch.Tensor and tensor.layout is torch.strided for tensor in (*tensors, *results))
        and all(0 < tensor.numel() <= MAX_ELEMENTS for tensor in tensors)
    )
