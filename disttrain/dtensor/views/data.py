"""`.data` of a DTensor: the same memory, with writes that autograd does not count against the tensor.

View copies must see them all the same. So all that `.data` gives of one tensor, and of whatever else autograd counts
with it, is counted by one counter of its own; what `.data` gives of that, which may have got a history of its own, by
another one, and so on in turn. The counters know each other: the memory knows of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import methodcaller
from typing import Any, cast

import torch

from disttrain.dtensor._torch import are_counted_together, become, is_traced

_KIN_IN = methodcaller("get", "_kin")


class _Kin:
    """Tensors without memory, each with a counter: the first counts as autograd does, two as `.data` is counted, others
    as `count_with` says."""

    __slots__ = ("counters",)

    def __init__(self, owner: torch.Tensor) -> None:
        self.counters = tuple(map(_bare, (owner.detach(), _data(owner), _data(owner))))

    def for_data_of(self, tensor: torch.Tensor) -> Any:
        """The counter of writes to `tensor.data`, which is another than that of writes to `tensor`."""
        uncounted, other = self.counters[1:3]
        return other if are_counted_together(tensor, uncounted) else uncounted

    def __deepcopy__(self, _: object) -> None:
        return None  # a copy has memory of its own


def data_of(tensor: Any) -> torch.Tensor:
    """The value of `tensor.data`."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return _data(tensor)
    owner, spec = _owner_of(tensor), tensor._spec
    kin = _kin_of(owner) or _new_kin(owner)
    uncounted = kin.for_data_of(tensor if spec.view_copy is None else spec.view_copy.counter)
    if uncounted._spec is not spec:
        become(uncounted, tensor)
        uncounted._spec = spec
    uncounted._local_tensor = tensor._local_tensor
    try:
        data: Any = uncounted.detach()
    finally:
        uncounted._local_tensor = None
    if spec.view_copy is not None:
        data._spec = spec.as_view_copy(spec.view_copy.counted_by(uncounted))
    vars(data)["_kin"] = kin
    return cast(torch.Tensor, data)


def count_with(owner: Any, views: Iterable[Any]) -> None:
    """Let writes to `views`, which share the memory of `owner` but are counted each by itself, be seen as its own."""
    if is_traced() or owner.is_inference() or owner._spec.view_copy is not None:
        return
    kin = _kin_of(owner) or _new_kin(owner)
    kin.counters += tuple(_bare(view.detach()) for view in views if view._spec.view_copy is None)


def _bare(counter: Any) -> Any:
    counter._local_tensor = None
    return counter


def num_writes(owner: torch.Tensor) -> int:
    """The number of writes to the memory of `owner`, which is no view copy, by way of it, its views and its `.data`."""
    kin = _kin_of(owner)
    return owner._version if kin is None else sum(counter._version for counter in kin.counters)


def num_data_writes(owners: Iterable[Any]) -> int:
    """The number of writes, `.data` included, to the memory of those owners whose `.data` somebody has asked for."""
    # In C as far as that goes: it is asked of each parameter in each step.
    return sum(counter._version for kin in filter(None, map(_KIN_IN, map(vars, owners))) for counter in kin.counters)


def _owner_of(tensor: Any) -> torch.Tensor:
    return cast(torch.Tensor, tensor if tensor._spec.view_copy is None else tensor._spec.view_copy.owner)


def _kin_of(owner: Any) -> _Kin | None:
    kin: _Kin | None = vars(owner).get("_kin")
    if kin is None:
        for candidate in vars(owner._local_tensor.untyped_storage()).get("_kin", ()):
            # Others may share the memory on this rank alone.
            if any(are_counted_together(owner, counter) for counter in candidate.counters):
                kin = vars(owner)["_kin"] = candidate
                break
    return kin


def _new_kin(owner: Any) -> _Kin:
    kin = vars(owner)["_kin"] = _Kin(owner)
    vars(owner._local_tensor.untyped_storage()).setdefault("_kin", []).append(kin)
    return kin


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, torch.Tensor.data.__get__(tensor))  # type: ignore[attr-defined]
