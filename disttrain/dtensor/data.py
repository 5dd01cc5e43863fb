"""`.data` of a DTensor: the same memory, with writes that autograd does not count against the tensor.

Views on loan must see them all the same. So all that `.data` gives of one tensor, and of its views, is counted by one
counter, and both sides know the other's.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from disttrain.dtensor._torch import become


class _Kin:
    """How else writes to a tensor's memory are counted; no part of its value, so not copied with it."""

    __slots__ = ("other", "source")

    def __init__(self, other: Any, source: tuple[Any, ...] | None = None) -> None:
        self.other = other
        """What counts as the other side does; it holds no graph."""
        self.source = source
        """The part and the spec that `other` is the `.data` of; None on the side that `.data` gave."""

    def __deepcopy__(self, _: object) -> None:
        return None


def data_of(tensor: Any) -> torch.Tensor:
    """What `tensor.data` is."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return _data(tensor)
    owner = _owner_of(tensor)
    kin = _kin_of(owner) or _new_kin(owner)
    # What `.data` gives of what it gave is counted as that is.
    uncounted = owner if kin.source is None else kin.other
    data: Any = uncounted.detach()
    if tensor is not owner or not _is_up_to_date(kin, owner):
        own: Any = _data(tensor)
        become(data, own)
        data._local_tensor, data._spec = own._local_tensor, own._spec
        if own._spec.loan is not None:
            data._spec = own._spec.lent(own._spec.loan.counted_by(uncounted))
    vars(data)["_kin"] = vars(uncounted)["_kin"]
    return cast(torch.Tensor, data)


def num_writes(tensor: torch.Tensor) -> int:
    """How often the memory of `tensor` has been written to by way of it, its views, and `.data` of these."""
    kin = _kin_of(_owner_of(tensor))
    return tensor._version if kin is None else tensor._version + int(kin.other._version)


def _owner_of(tensor: Any) -> torch.Tensor:
    """The tensor itself, or the one that it is a view of."""
    viewed: torch.Tensor = tensor if tensor._spec.loan is None else tensor._spec.loan.owner
    base = viewed._base
    return viewed if base is None else base


def _kin_of(owner: torch.Tensor) -> _Kin | None:
    return vars(owner).get("_kin")


def _is_up_to_date(kin: _Kin, owner: Any) -> bool:
    return kin.source is None or (kin.source[0] is owner._local_tensor and kin.source[1] is owner._spec)


def _new_kin(owner: Any) -> _Kin:
    uncounted: Any = _data(owner)
    vars(uncounted)["_kin"] = _Kin(owner.detach())
    kin = vars(owner)["_kin"] = _Kin(uncounted, (owner._local_tensor, owner._spec))
    return kin


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, torch.Tensor.data.__get__(tensor))  # type: ignore[attr-defined]
