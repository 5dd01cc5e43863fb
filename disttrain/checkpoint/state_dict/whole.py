"""Whole tensors and the parts that ranks hold: gathered for a state dict, cut or broadcast for a load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttrain.checkpoint.format.dtypes import dtype_name, dtype_named
from disttrain.checkpoint.state.tree import local_parts
from disttrain.dtensor import DTensor
from disttrain.errors import StateDictError
from disttrain.process_group import broadcast, broadcast_object_list, current_world, get_rank, is_initialized
from disttrain.process_group.calls.packing import pack

Path = tuple[Any, ...]
_TENSOR = b"tensor"
"""The key of a place that a tensor is broadcast for; no state dict has keys of bytes."""


def own_rank() -> int:
    return get_rank() if is_initialized() else 0


def mapped(value: Any, change: Callable[[Path, torch.Tensor], Any], path: Path = ()) -> Any:
    """Nested dicts, lists and tuples with `change(path, tensor)` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: mapped(inner, change, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        inner = [mapped(item, change, (*path, index)) for index, item in enumerate(value)]
        return inner if isinstance(value, list) else tuple(inner)
    return value


def gathered(state: dict[str, Any], *, is_full: bool, cpu_offload: bool) -> dict[str, Any]:
    """The state as it was asked for. Collective where `is_full`: every rank of each DTensor's mesh.

    Returns: `{}` on all ranks but 0 where whole tensors go to the CPU, which would not hold one copy for each rank.
    """
    if not is_full and not cpu_offload:
        return state
    is_kept = not (is_full and cpu_offload) or own_rank() == 0

    def change(_: Path, tensor: torch.Tensor) -> torch.Tensor | None:
        if is_full and isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not is_kept:
            return None  # at once, since ranks other than 0 may not have room for all of them
        return tensor.cpu() if cpu_offload else tensor

    changed: dict[str, Any] = mapped(state, change)
    return changed if is_kept else {}


def laid_as(like: torch.Tensor | None, whole: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A whole tensor as `like` lies: the parts of this rank, written into `like` itself unless that has no memory.

    A tensor that is no DTensor, or has another shape, stays whole; the caller checks shapes.
    """
    if not isinstance(like, DTensor) or isinstance(whole, DTensor) or like.shape != whole.shape:
        return whole.detach() if isinstance(whole, DTensor) or not whole.ndim else whole.detach().to(device)
    target = like
    if like.is_meta:
        target = DTensor.from_local(
            torch.empty_like(like.to_local(), device=device),
            like.device_mesh,
            like.placements,
            shape=like.shape,
            stride=like.stride(),
        )
    for box, part in local_parts(target).items():
        part.copy_(whole.detach()[box.slices()])
    return target


def broadcast_whole(
    state: dict[str, Any], lay: Callable[[Path, torch.Tensor], Any], device: torch.device
) -> dict[str, Any]:
    """Rank 0's state on all ranks; of each tensor a rank keeps what `place(path, whole tensor)` returns.

    One tensor is there at a time. Raises StateDictError, on every rank, for what cannot travel.
    Collective: every rank of the default group.
    """
    if not is_initialized() or current_world("broadcast_from_rank0").world_size == 1:
        return dict(mapped(state, lay))
    tensors: list[torch.Tensor] = []
    plan: list[Any] = [_plan(state, tensors) if own_rank() == 0 else None]
    broadcast_object_list(plan, src=0)
    problem, skeleton, rows = plan[0]
    if problem:
        raise StateDictError(
            "set_state_dict",
            f"rank 0 cannot broadcast its state: {problem}",
            "Give whole tensors and plain values, as full_state_dict=True returns them.",
            rank=own_rank(),
        )
    tensors_kept = [
        lay(tuple(path), _sent(tensors, at, shape, dtype, device)) for at, (path, shape, dtype) in enumerate(rows)
    ]
    return dict(_filled(skeleton, tensors_kept))


def _plan(state: dict[str, Any], tensors: list[torch.Tensor]) -> list[Any]:
    """The error, if any; the state with a mark for each tensor; and path, shape and dtype of each.

    Numbers in tensors travel with it.
    """
    rows: list[list[Any]] = []

    def mark(path: Path, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, DTensor):
            raise StateDictError("set_state_dict", f"{'.'.join(map(str, path))} is a DTensor.")
        if not tensor.ndim:
            return tensor.detach().cpu()
        rows.append([list(path), list(tensor.shape), dtype_name(tensor.dtype)])
        tensors.append(tensor)
        return {_TENSOR: len(tensors) - 1}

    try:
        plan = ["", mapped(state, mark), rows]
        pack(plan)
        return plan
    except Exception as error:  # noqa: BLE001  the others wait for this rank's word
        return [getattr(error, "problem", f"{error}"), None, []]


def _sent(
    tensors: Sequence[torch.Tensor], at: int, shape: Sequence[int], dtype: str, device: torch.device
) -> torch.Tensor:
    if own_rank() == 0:
        whole = tensors[at].detach().to(device).contiguous()
    else:
        whole = torch.empty(shape, dtype=dtype_named(dtype), device=device)
    if whole.numel():
        broadcast(whole.view(-1).view(torch.uint8), src=0)  # as bytes: no transport knows all dtypes
    return whole


def _filled(skeleton: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(skeleton, dict):
        if _TENSOR in skeleton:
            return tensors[skeleton[_TENSOR]]
        return {key: _filled(inner, tensors) for key, inner in skeleton.items()}
    if isinstance(skeleton, list | tuple):
        inner = [_filled(item, tensors) for item in skeleton]
        return inner if isinstance(skeleton, list) else tuple(inner)
    return skeleton


def transport_device(device: torch.device) -> torch.device:
    """The device on which tensors for `device` are sent."""
    if not is_initialized() or current_world("broadcast_from_rank0").default_group.serves(device.type):
        return device
    return torch.device("cpu")
