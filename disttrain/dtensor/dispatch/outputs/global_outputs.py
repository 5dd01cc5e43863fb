"""Shapes, strides and dtypes of an operator's global results, by torch's kernels for the meta device.

Many of these kernels are Python, and take longer than all else in a plan. They depend on shapes and dtypes only. So
their answers are cached, for other layouts of the same tensors and for ranks that are threads of this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from disttrain.dtensor._torch import OpFacts, OpOverload
from disttrain.dtensor.dispatch.outputs.known_results import known_results
from disttrain.dtensor.dispatch.outputs.known_shapes import known_outputs

_MAX_CACHED = 4096
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

_BY_VALUE = frozenset(
    {int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)

Outputs = tuple[torch.Tensor, ...] | None


class _Unkeyed(Exception):
    """An argument that no key can be made of."""


class _MetaCall:
    """A call on the meta device, as a key: calls are equal if every kernel of torch answers them in the same way."""

    __slots__ = ("args", "hash", "key", "kwargs", "op")

    def __init__(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.key = op, torch.get_default_dtype(), _key_of(args), *kwargs, _key_of(tuple(kwargs.values()))
        self.hash = hash(self.key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MetaCall) and self.key == other.key


def global_outputs(
    op: OpOverload, op_facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any], *, may_cache: bool
) -> Outputs:
    """The results of `op` for `args` and `kwargs`, whose tensors are on the meta device; None where it returns other
    things than tensors. Not to be written to.

    A gradient that was not asked for, or a number among tensors, has an empty tensor in its place. `may_cache`: no size
    is a compiler's symbol, so that calls with equal ones have equal results.
    """
    if may_cache:
        outputs = known_outputs(op, args, kwargs)
        if outputs is None:
            outputs = known_results(op, args, kwargs)
        if outputs is not None:
            return outputs
    meta_kwargs = dict(kwargs)
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = torch.device("meta")
    meta_kwargs.pop("pin_memory", None)
    if "generator" in meta_kwargs:
        meta_kwargs["generator"] = None
    # A user's operator may answer differently each time, and one that reshapes its argument would change the cached
    # one.
    if may_cache and op.namespace == "aten" and not op_facts.changes_shape:
        try:
            return _cached_outputs(_MetaCall(op, args, meta_kwargs))
        except _Unkeyed:
            pass
    return _outputs(op, args, meta_kwargs)


@lru_cache(_MAX_CACHED)
def _cached_outputs(call: _MetaCall) -> Outputs:
    return _outputs(call.op, call.args, call.kwargs)


def _outputs(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs:
    try:
        # Only the part can say whether its memory allows such a view; otherwise it is copied.
        results = args[0].reshape(args[1]) if op is _UNSAFE_VIEW else op(*args, **kwargs)
    except NotImplementedError:
        return None
    except TypeError as error:
        # Some of these kernels ask `torch._check` with a number (upsampling of an empty batch, torch 2.13); the
        # operator itself does not mind.
        if "cond must be a bool" not in str(error):
            raise
        return None
    except RuntimeError:
        # A user's operator may have no kernel for shapes; running it with values shows whether it raises.
        if op.namespace == "aten":
            raise
        return None
    if results is None:
        return ()
    outputs = tuple(results) if isinstance(results, list | tuple) else (results,)
    if not any(isinstance(output, torch.Tensor) for output in outputs):
        return None
    if not all(output is None or isinstance(output, torch.Tensor | int) for output in outputs):
        return None
    return tuple(output if isinstance(output, torch.Tensor) else torch.empty(0, device="meta") for output in outputs)


def _key_of(value: Any) -> Any:
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if kind is list or kind is tuple:
        return tuple([_key_of(item) for item in value])
    if kind is torch.Tensor:
        return value.shape, value.stride(), value.dtype
    raise _Unkeyed
