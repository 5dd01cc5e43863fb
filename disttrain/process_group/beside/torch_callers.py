"""Refuses functions of torch's that are given meshes, placements or groups of ours, as by a script of which some
imports are still torch's.

Some of these functions would fail by a bare assertion, and some would go on with half of what they need.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final, NoReturn

from disttrain.errors import HalfMovedError

OURS: Final = {
    "disttrain": ("DeviceMesh", "init_device_mesh"),
    "disttrain.context_parallel": ("context_parallel",),
    "disttrain.dtensor": (
        *("DTensor", "distribute_module", "distribute_tensor", "empty", "full", "local_map", "ones", "rand", "randn"),
        "zeros",
    ),
    "disttrain.fsdp2": ("fully_shard",),
    "disttrain.tp": ("parallelize_module",),
}
"""The functions that have the names of torch's that take meshes or placements, by the packages to import them from."""
PRIVATE_NAMES: Final = (
    *("_coordinate_on_dim", "_create_flatten_mesh", "_create_sub_mesh", "_create_unflatten_mesh", "_device_type"),
    *("_dim_group_names", "_flatten_mapping", "_flatten_rank_map", "_get_all_submeshes", "_get_mesh_dim_by_name"),
    *("_get_root_mesh", "_get_root_mesh_dim", "_get_slice_mesh_layout", "_is_current_rank_part_of_mesh"),
    *("_mesh_dim_names", "_pg_registry", "_rank_map", "_root_mesh", "_thread_id"),
)
"""The attributes that torch's functions read of torch's meshes."""
_LOOK_UP: Final = ("get_backend", "_resolve_group")
_HAND_TO_CPP: Final = "DistributedDataParallel.__init__"
_TORCHS: Final = "torch.distributed"
_MADE_BY: Final = {
    "mesh": "torch.distributed.device_mesh.init_device_mesh",
    "placement": "torch.distributed.tensor's Shard, Replicate or Partial",
}


def check_caller(what: str) -> None:
    """Raises HalfMovedError where a method of a mesh, placement or group, which `what` says, is called by a function of
    torch's that cannot go on with it. Calls of user code and of ours pass."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__", "").startswith(_TORCHS) and not _is_description(frame):
        _refuse(frame, what)


def _is_description(frame: FrameType) -> bool:
    """True where user code makes a description of a mesh, such as an `FSDPMeshInfo` for `fully_shard`, which is a
    dataclass of torch's and asks the mesh for what it holds."""
    module, caller = frame.f_globals["__name__"], frame.f_back
    if frame.f_code.co_name != "__post_init__":
        return False
    while caller is not None and caller.f_globals.get("__name__") == module:
        caller = caller.f_back
    return caller is not None and not caller.f_globals.get("__name__", "").startswith("torch.")


def check_shower(what: str) -> None:
    """Raises HalfMovedError where a group is put into the text of an error, by a function of torch's that looks groups
    up and has not found it."""
    frame = sys._getframe(2)
    if frame.f_code.co_name in _LOOK_UP and frame.f_globals.get("__name__", "").startswith(_TORCHS):
        _refuse(frame, what)


def check_taker() -> None:
    """Raises HalfMovedError where a group is asked whether it is true, by a class of torch's that gives it to C++."""
    frame = sys._getframe(2)
    if frame.f_code.co_qualname == _HAND_TO_CPP and frame.f_globals.get("__name__", "").startswith("torch."):
        _refuse(frame, "group")


def _refuse(frame: FrameType, what: str) -> NoReturn:
    module, name = _asked(frame)
    first = name.partition(".")[0]
    ours = next((package for package, names in OURS.items() if first in names), None)
    if what == "group":
        has_ours = name in getattr(sys.modules.get("disttrain"), "__all__", ())
        remedy = f"Call disttrain's {name}, or give " if has_ours else "Give "
        remedy += "disttrain.to_torch(group)."
    else:
        remedy = f"{f'Import {first} from {ours}; or make' if ours else 'Make'} the {what} by {_MADE_BY[what]}."
    raise HalfMovedError(f"{module}.{name}", f"it is torch's, and is given a {what} of disttrain's.", remedy)


def _asked(frame: FrameType) -> tuple[str, str]:
    """The public module, and the name, of the function of torch's that was called first."""
    asked, caller = (_TORCHS, "DeviceMesh"), frame
    while caller.f_globals.get("__name__", "").startswith("torch."):
        decorated = caller.f_locals.get("func") if caller.f_code.co_name == "wrapper" else None
        module = getattr(decorated, "__module__", caller.f_globals["__name__"])
        name = getattr(decorated, "__qualname__", caller.f_code.co_qualname).removesuffix(".__init__")
        is_public = not any(part.startswith(("_", "<")) for part in name.split("."))
        if is_public and module.startswith((_TORCHS, "torch.nn.parallel")):
            asked = module.partition("._")[0], name
        if caller.f_back is None:
            break
        caller = caller.f_back
    return asked


class NotForTorch:
    """Answers functions of torch's that read a mesh as if it were torch's, name by name: a class with `__getattr__`
    takes three times as long for each attribute."""


def _refusing(name: str) -> property:
    def read(mesh: object) -> NoReturn:
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__", "").startswith("torch."):
            _refuse(frame, "mesh")
        raise AttributeError(f"{type(mesh).__name__!r} object has no attribute {name!r}")

    return property(read)


for _name in PRIVATE_NAMES:
    setattr(NotForTorch, _name, _refusing(_name))
