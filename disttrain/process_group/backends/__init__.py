"""Which transports exist, and which one serves a device type unless the user says otherwise."""

from __future__ import annotations

from disttrain.errors import BackendError
from disttrain.process_group.backends.base import Backend, CompletedWork, Membership
from disttrain.process_group.backends.fake import FakeBackend
from disttrain.process_group.backends.gloo import GlooBackend
from disttrain.process_group.backends.nccl import NcclBackend
from disttrain.process_group.backends.threads import ThreadsBackend

__all__ = ["BACKENDS", "Backend", "CompletedWork", "Membership", "choose_backends"]

BACKENDS: dict[str, type[Backend]] = {
    "fake": FakeBackend,
    "gloo": GlooBackend,
    "nccl": NcclBackend,
    "threads": ThreadsBackend,
}
_DEFAULTS = ("gloo", "nccl")


def choose_backends(wanted: str | None) -> dict[str, type[Backend]]:
    """Device type -> transport, for `None` (all that this machine can), `"gloo"`, or `"cpu:gloo,cuda:nccl"`.

    Raises BackendError for an unknown or unavailable name, and for a device that the named transport cannot serve.
    """
    if wanted is None:
        return {
            device: BACKENDS[name]
            for name in _DEFAULTS
            if BACKENDS[name].is_available()
            for device in BACKENDS[name].devices
        }
    chosen: dict[str, type[Backend]] = {}
    for part in wanted.lower().split(","):
        device, _, name = part.strip().rpartition(":")
        backend = _available(name)
        if device and device not in backend.devices:
            raise BackendError(
                "init_process_group",
                f"backend {name!r} does not serve device {device!r}, only {', '.join(backend.devices)}.",
                f"Say for instance {backend.devices[0]}:{name}.",
            )
        chosen.update(dict.fromkeys((device,) if device else backend.devices, backend))
    return chosen


def _available(name: str) -> type[Backend]:
    backend = BACKENDS.get(name)
    if backend is None:
        raise BackendError(
            "init_process_group", f"there is no backend {name!r}.", f"Known are {', '.join(sorted(BACKENDS))}."
        )
    if not backend.is_available():
        raise BackendError(
            "init_process_group",
            f"backend {name!r} is not available on this machine.",
            "Leave `backend` out to get what the machine has.",
        )
    return backend
