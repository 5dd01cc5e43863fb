"""Queries of the backends that this machine has, and of the launcher of this process."""

from __future__ import annotations

from typing import Any

import torch

from disttrain.errors import BackendError
from disttrain.process_group._c10d import DebugLevel
from disttrain.process_group.backends import BACKENDS, Backend
from disttrain.settings import DEBUG, TORCHELASTIC_RUN_ID


def is_backend_available(backend: object) -> bool:
    """True when a backend of that name is registered and can be used on this machine."""
    kind = BACKENDS.get(backend.lower()) if isinstance(backend, str) else None
    return kind is not None and kind.is_available()


def is_gloo_available() -> bool:
    """True when torch has Gloo."""
    return is_backend_available("gloo")


def is_nccl_available() -> bool:
    """True when torch has NCCL and there is a GPU."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """False, as of the other transports of torch's that are not driven here."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """False; see `is_mpi_available`."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """False; see `is_mpi_available`."""
    return is_backend_available("xccl")


def is_torchelastic_launched() -> bool:
    """True when disttrain-launch, or torchrun, has started this process."""
    return TORCHELASTIC_RUN_ID.read() is not None


def get_default_backend_for_device(device: str | torch.device) -> str:
    """The transport that serves a device unless somebody says otherwise: "gloo" for "cpu", "nccl" for "cuda:1".

    Raises BackendError for a device that none serves.
    """
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        problem = f"{device!r} is no device."
        raise BackendError("get_default_backend_for_device", problem, 'Give "cpu", "cuda", or one of these.') from error
    name = Backend.default_device_backend_map.get(kind)
    if name is None:
        problem = f"no transport serves {kind!r}."
        raise BackendError("get_default_backend_for_device", problem, "There are some for cpu and cuda.")
    return name


def get_debug_level() -> Any:
    """The level that DISTTRAIN_DEBUG sets for the next world: OFF, INFO or DETAIL."""
    return DebugLevel.__members__[DEBUG.read().upper()]
