"""The registry of backends, and the choice of one for each device type unless the user names it.

Others come from `register_backend`, or from an installed package with an entry point in the group `disttrain.backends`:

    [project.entry-points."disttrain.backends"]
    mine = "my_package.transport:MineBackend"

which is loaded when somebody first asks for `backend="mine"`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from disttrain.errors import BackendError
from disttrain.process_group.backends.base import Backend, CompletedWork, GivableUp, Membership
from disttrain.process_group.backends.fake import FakeBackend
from disttrain.process_group.backends.gloo import GlooBackend
from disttrain.process_group.backends.nccl import NcclBackend
from disttrain.process_group.backends.threads import ThreadsBackend

__all__ = ["BACKENDS", "Backend", "CompletedWork", "GivableUp", "Membership", "choose_backends", "register_backend"]

BACKENDS: Final[dict[str, type[Backend]]] = {
    "fake": FakeBackend,
    "gloo": GlooBackend,
    "nccl": NcclBackend,
    "threads": ThreadsBackend,
}
_DEFAULTS = ("gloo", "nccl")
_ENTRY_POINTS = "disttrain.backends"


def register_backend(name: str, backend: type[Backend]) -> None:
    """Make `backend` known to this process as `name`, to be asked for by `init_process_group(backend=name)`.

    Raises BackendError for a name that is taken or cannot be one, and for what is not a Backend with `devices`.
    """
    if not name.isidentifier() or name != name.lower():
        raise BackendError("register_backend", f"{name!r} is no name.", "Use lower-case letters, digits and _.")
    if BACKENDS.get(name, backend) is not backend:
        raise BackendError("register_backend", f"there is a backend {name!r} already.", "Choose another name.")
    BACKENDS[name] = _checked("register_backend", name, backend)


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
    if not isinstance(wanted, str):
        raise BackendError("init_process_group", f"backend={wanted!r} is no name.", 'Say for instance "cpu:gloo".')
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
    backend = BACKENDS.get(name) or _load(name)
    if backend is None:
        installed = {point.name for point in entry_points(group=_ENTRY_POINTS)}
        raise BackendError(
            "init_process_group",
            f"there is no backend {name!r}.",
            f"Known are {', '.join(sorted(installed.union(BACKENDS)))}.",
        )
    if not backend.is_available():
        raise BackendError(
            "init_process_group",
            f"backend {name!r} is not available on this machine.",
            "Leave `backend` out to get what the machine has.",
        )
    return backend


def _load(name: str) -> type[Backend] | None:
    """The backend of an installed package, which is registered with that."""
    for point in entry_points(group=_ENTRY_POINTS, name=name):
        try:
            backend = point.load()
        except Exception as error:
            raise BackendError(
                "init_process_group",
                f"backend {name!r} of {point.value} cannot be loaded: {type(error).__name__}: {error}.",
                "Mend or remove the package that brings it.",
            ) from error
        BACKENDS[name] = _checked("init_process_group", name, backend)
        return BACKENDS[name]
    return None


def _checked(operation: str, name: str, backend: object) -> type[Backend]:
    if isinstance(backend, type) and issubclass(backend, Backend) and hasattr(backend, "devices"):
        return backend
    raise BackendError(
        operation,
        f"backend {name!r} is {backend!r}, not a subclass of Backend with devices.",
        "Derive it from disttrain.process_group.Backend.",
    )
