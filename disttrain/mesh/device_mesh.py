"""DeviceMesh: the ranks of a job as a grid, with a process group along each axis."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NoReturn
from weakref import WeakValueDictionary

from disttrain.errors import ArgumentError, MeshError
from disttrain.mesh._torch import GraphConstant, hold_in_graphs
from disttrain.mesh.given import given_groups, grid_of, layout_of
from disttrain.mesh.layout import MeshLayout
from disttrain.process_group import ProcessGroup, World, current_world, init_process_group, is_initialized
from disttrain.process_group.beside.torch_callers import NotForTorch, check_caller

if TYPE_CHECKING:
    from torch import Tensor

_MAX_SHOWN: Final = 64
"""Ranks up to which a mesh shows each of its ranks."""

Override = Mapping[str | int, str | tuple[str, object]]
"""By an axis's name or index: the transports of its groups, such as "gloo", with their options or without."""


class DeviceMesh(NotForTorch, GraphConstant):
    """A grid of ranks that compute on `device_type`. Made by `init_device_mesh`, or from explicit ranks.

    Making one costs no communication, since its groups connect when they are first used. Meshes whose axes have the
    same ranks share them. Two meshes are equal when they place the same ranks alike and have the same groups.

    Args: mesh  ranks, as nested lists or an integer tensor;  mesh_dim_names  one name per axis.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Tensor | Sequence[object],
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> None:
        self._set(_world(), device_type, layout_of(mesh, mesh_dim_names), None)

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Tensor | Sequence[object] | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """A mesh whose axes have groups that there are already; `mesh` and `mesh_dim_names` say how several lie.

        Args: group  that of the only axis, or one for each;  mesh  ranks, as for DeviceMesh: along each axis, through
              this rank, those of its group.
        Raises: MeshError when they are others. To be called by the ranks of the groups; nothing is sent.
        """
        world, groups = given_groups(group)
        if len(groups) > 1 and (mesh is None or mesh_dim_names is None):
            problem, rank = f"of {len(groups)} groups it is not said how they lie.", world.rank
            raise MeshError("DeviceMesh.from_group", problem, "Give mesh and mesh_dim_names.", rank=rank)
        layout = layout_of(groups[0].members if mesh is None else mesh, mesh_dim_names)
        rows = [axis_group.members for axis_group in groups]
        is_here = world.rank in layout.members
        if not is_here or rows != [layout.along(world.rank, [axis]).members for axis in range(len(layout.shape))]:
            raise MeshError(
                "DeviceMesh.from_group",
                f"mesh {grid_of(layout).tolist()} has other rows than the groups' {[*map(list, rows)]}.",
                "Give a mesh whose axes, through this rank, have the groups' ranks.",
                rank=world.rank,
            )
        made = cls._of(world, device_type, layout, None)
        made._groups = groups
        return made

    @classmethod
    def _of(cls, world: World, device_type: str, layout: MeshLayout, root: DeviceMesh | None) -> DeviceMesh:
        mesh = cls.__new__(cls)
        mesh._set(world, device_type, layout, root)
        return mesh

    def _set(self, world: World, device_type: str, layout: MeshLayout, root: DeviceMesh | None) -> None:
        if not 0 <= layout.members.lowest <= layout.members.highest < world.world_size:
            outside = [rank for rank in layout.members if not 0 <= rank < world.world_size]
            raise MeshError(
                "DeviceMesh",
                f"ranks {outside} are outside the job's {world.world_size} ranks.",
                "Start more processes, or make the mesh smaller.",
                rank=world.rank,
            )
        self.world = world
        self.device_type = device_type
        self.layout = layout
        self.mesh_dim_names = layout.axis_names
        """The names of the axes."""
        self.ndim = len(layout.shape)
        """Number of axes."""
        self.shape = layout.shape
        """Number of ranks along each axis."""
        self.root = self if root is None else root
        """The mesh that this one was sliced from; itself when it was not."""
        self._flattened: dict[str, tuple[int, ...]] = {}
        self._coordinate = layout.coordinate(world.rank)
        self._groups: tuple[ProcessGroup, ...] = ()
        if self._coordinate is not None:
            axes = range(len(layout.shape))
            self._groups = tuple(self._group_of(layout, [axis]) for axis in axes)
        # Ranks that are threads of one process have meshes alike, each in its own world.
        self._hash = hash((id(world), device_type, layout))

    @property
    def mesh(self) -> Tensor:
        """The ranks as an int64 tensor of the mesh's shape."""
        return grid_of(self.layout)

    def size(self, mesh_dim: int | None = None) -> int:
        """Number of ranks on the mesh, or along one axis."""
        return math.prod(self.layout.shape) if mesh_dim is None else self.layout.shape[mesh_dim]

    def get_rank(self) -> int:
        """The global rank of this process."""
        return self.world.rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """The position of this process along each axis; None when it is not on the mesh."""
        check_caller("mesh")
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """The position of this process along an axis, or a flattened one; the only axis may be left out."""
        if self._is_flattened(mesh_dim):
            return self.get_group(mesh_dim).group_rank
        return self._position("get_local_rank")[self._one_axis("get_local_rank", mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """The process group along an axis, or a flattened one, through this rank; the only axis may be left out."""
        check_caller("mesh")
        if self._is_flattened(mesh_dim):
            return self.root.group_along(self.root._flattened[str(mesh_dim)])
        axis = self._one_axis("get_group", mesh_dim)
        if not self._groups:
            self._position("get_group")
        return self._groups[axis]

    def group_along(self, axes: Sequence[int]) -> ProcessGroup:
        """The process group of the ranks that differ from this one along the given axes only, in the axes' order."""
        if len(axes) == 1:
            return self.get_group(axes[0])
        self._position("group_along")
        return self._group_of(self.layout, axes)

    def get_all_groups(self) -> list[ProcessGroup]:
        """The process groups along all axes, through this rank."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh through this rank along the named axes, some of which may be flattened ones."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        parts = [self._axes_of(name) for name in names]
        axes = [axis for part in parts for axis in part]
        if len(set(axes)) != len(axes):
            raise MeshError("mesh[...]", f"axes {names} repeat.", "Name each axis once.", rank=self.world.rank)
        is_flat = any(name in self._flattened for name in names)
        if axes == list(range(self.ndim)) and not is_flat:
            return self
        self._position("mesh[...]")
        layout = self.layout.along(self.world.rank, axes)
        if is_flat:
            layout = MeshLayout(layout.members, tuple(self._size_of(part) for part in parts), names)
        made = DeviceMesh._of(self.world, self.device_type, layout, self.root)
        # The same groups, which may have been given by the user.
        made._groups = tuple(
            self._groups[part[0]] if len(part) == 1 else group for part, group in zip(parts, made._groups, strict=True)
        )
        return made

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Joins all axes to one, named `mesh_dim_name` (default: their names, joined by "_"), which the root keeps.

        Raises: MeshError without names, and for a name that is another axis's.
        """
        names, root = self.layout.axis_names, self.root
        if names is None or root.layout.axis_names is None:
            problem = f"the axes of {self!r} have no names."
            raise MeshError("mesh._flatten", problem, "Name the axes with mesh_dim_names.", rank=self.world.rank)
        name = mesh_dim_name or "_".join(names)
        if names == (name,):
            return self
        axes = tuple(axis for name in names for axis in root._axes_of(name))
        if name in root.layout.axis_names or root._flattened.get(name, axes) != axes:
            problem = f"{name!r} is another axis of {root.layout}."
            raise MeshError("mesh._flatten", problem, "Give another name.", rank=self.world.rank)
        root._flattened[name] = axes
        return root[name]

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Override | None = None,
    ) -> DeviceMesh:
        """Cuts one axis into several, named `mesh_dim_names`; `backend_override` as in init_device_mesh.

        Slices of meshes that were made so of one another can be joined, as fully_shard does with tensor parallelism's.
        Raises: MeshError for sizes that don't multiply to the axis's.
        """
        axis = self.layout.axis(dim)
        layout = self.layout.unfolded(axis, tuple(mesh_sizes), tuple(mesh_dim_names))
        made = DeviceMesh._of(self.world, self.device_type, layout, None)
        if self._groups:
            cut = len(mesh_sizes)
            made._groups = (*self._groups[:axis], *made._groups[axis : axis + cut], *self._groups[axis + 1 :])
        return made._with_backends(backend_override)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """The mesh of the axes of all, through this rank. Raises MeshError where they are no axes of one grid."""
        whole = device_mesh_list[0]
        for mesh in device_mesh_list[1:]:
            joined = whole.joined_with(mesh)
            if joined is None:
                raise MeshError(
                    "mesh._concatenate",
                    f"{whole.layout} and {mesh.layout} are no axes of one mesh.",
                    "Give slices of one mesh, or of meshes that _unflatten made of one, with names of their own.",
                    rank=whole.world.rank,
                )
            whole = joined
        return whole

    def joined_with(self, other: DeviceMesh) -> DeviceMesh | None:
        """The mesh of this one's axes and then the other's; None unless both are slices of one grid of ranks.

        Equal meshes may have come of different ones, and a tensor is on whichever was first: so either's root will do,
        and roots that go over the same ranks in one order.
        """
        names, other_names = self.mesh_dim_names or (), other.mesh_dim_names or ()
        joined = (*names, *other_names)
        if not names or not other_names or set(names) & set(other_names):
            return None
        for root in (self.root, other.root):
            if set(joined) <= set(root.mesh_dim_names or ()) and (root[names], root[other_names]) == (self, other):
                return root[joined]
        same_place = (self.world, self.device_type) == (other.world, other.device_type)
        if not same_place or self.root.layout.members != other.root.layout.members:
            return None
        layout = self.layout.joined(other.layout, self.world.rank, self.root.layout.members)
        if layout is None:
            return None
        made = DeviceMesh._of(self.world, self.device_type, layout, None)
        made._groups = (*self._groups, *other._groups)
        return made

    @property
    def _layout(self) -> MeshLayout:
        return self.layout

    def _sym_get_coordinate(self, index: int) -> int:
        return self.get_local_rank(index)

    def _with_backends(self, override: Override | None) -> DeviceMesh:
        """Gives this mesh, which nobody has yet, groups of their own along the axes that `override` names."""
        for name_or_axis, wanted in (override or {}).items():
            axis = self.layout.axis(name_or_axis)
            backend, options = (wanted, None) if isinstance(wanted, str) else wanted
            if not self._groups:
                continue
            group = self.world.new_group(self._groups[axis].members, backend=backend, options=options)
            assert isinstance(group, ProcessGroup)  # its ranks are those through this one
            self._groups = (*self._groups[:axis], group, *self._groups[axis + 1 :])
        return self

    def _axes_of(self, name: str) -> tuple[int, ...]:
        return self._flattened.get(name) or (self.layout.axis(name),)

    def _is_flattened(self, mesh_dim: int | str | None) -> bool:
        """True if the name is no axis here, but axes of the root that were made one."""
        return mesh_dim in self.root._flattened and mesh_dim not in (self.mesh_dim_names or ())

    def _size_of(self, axes: Sequence[int]) -> int:
        return math.prod(self.shape[axis] for axis in axes)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            type(other) is DeviceMesh  # torch's `isinstance` for what a graph holds is slow
            and self._hash == other._hash
            and self.world is other.world
            and self.device_type == other.device_type
            and self.layout == other.layout
            # Of equal meshes one stands for all, and so do its groups.
            and self._groups == other._groups
        )

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, _: object) -> DeviceMesh:
        """The mesh itself: copies of a tensor lie on the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        problem = "a mesh has groups of this process, and what lies on it means nothing to another process."
        raise ArgumentError("pickle", problem, "Save states with disttrain.checkpoint.", rank=self.world.rank)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """The expression for this mesh in the code of a compiled graph, and the names in it."""
        _IN_GRAPHS[id(self)] = self
        return f"DeviceMesh._in_graph({id(self)})", {"DeviceMesh": DeviceMesh}

    @staticmethod
    def _in_graph(number: int) -> DeviceMesh:
        return _IN_GRAPHS[number]

    def __repr__(self) -> str:
        members = self.layout.members
        ranks = members.text if len(members) > _MAX_SHOWN else list(members)
        return f"DeviceMesh({self.device_type}, {self.layout}, ranks {ranks})"

    def _group_of(self, layout: MeshLayout, axes: Sequence[int]) -> ProcessGroup:
        group = self.world.shared_group(layout.along(self.world.rank, axes).members)
        if layout.axis_names is not None and not group.axis_name:
            group.axis_name = "+".join(layout.axis_names[axis] for axis in axes)
        return group

    def _position(self, operation: str) -> tuple[int, ...]:
        if self._coordinate is None:
            raise MeshError(
                operation, f"this rank is not on {self!r}.", "Ask on ranks of the mesh only.", rank=self.world.rank
            )
        return self._coordinate

    def _one_axis(self, operation: str, mesh_dim: int | str | None) -> int:
        if mesh_dim is not None:
            return self.layout.axis(mesh_dim)
        if self.ndim != 1:
            raise MeshError(
                operation, f"the mesh has {self.ndim} axes ({self.layout}).", "Say which one.", rank=self.world.rank
            )
        return 0


# Who has been named in a graph that is alive.
_IN_GRAPHS: WeakValueDictionary[int, DeviceMesh] = WeakValueDictionary()
# For Dynamo the group is a constant, as the mesh is: of a DTensor's made there it could not say where it is from.
DeviceMesh.get_group._dynamo_marked_constant = True  # type: ignore[attr-defined]
hold_in_graphs(
    DeviceMesh,
    [
        *("__eq__", "__getitem__", "_layout", "_sym_get_coordinate", "device_type", "get_coordinate"),
        *("get_local_rank", "get_rank", "mesh_dim_names", "ndim", "shape", "size"),
    ],
)


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Override | None = None,
) -> DeviceMesh:
    """Places all ranks of the job on a grid of `mesh_shape`, in row-major order; joins the job first if need be.

    `backend_override` gives axes, by name or index, groups of their own over other transports: "gloo", "nccl", "fake",
    which sends nothing, or such a name and its options. Raises: MeshError when the shape is not that of all ranks.
    """
    world = _world()
    try:
        shape = tuple(map(operator.index, mesh_shape))
        hash(device_type)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    except TypeError as error:
        arguments = f"device_type={device_type!r}, mesh_shape={mesh_shape!r} and mesh_dim_names={mesh_dim_names!r}"
        remedy = 'Give a type, as "cpu", numbers, and names.'
        raise MeshError("init_device_mesh", f"{arguments} are given: {error}.", remedy, rank=world.rank) from error
    if math.prod(shape) != world.world_size:
        raise MeshError(
            "init_device_mesh",
            f"shape {shape} has {math.prod(shape)} places, the job {world.world_size} ranks; they must be equal.",
            "Change the shape, or give DeviceMesh the ranks of a part of the job.",
            rank=world.rank,
        )
    layout = MeshLayout(range(world.world_size), shape, names)
    return DeviceMesh._of(world, device_type, layout, None)._with_backends(backend_override)


def _world() -> World:
    if not is_initialized():
        init_process_group()
    return current_world("DeviceMesh")
