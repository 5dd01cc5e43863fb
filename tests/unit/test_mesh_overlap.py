"""What is left of a mesh's axes beside those that lie within them."""

from __future__ import annotations

import itertools

import disttrain
from disttrain.mesh import DeviceMesh
from disttrain.mesh.overlap import without
from disttrain.testing import run_threads


def named(*names: str) -> DeviceMesh:
    return disttrain.init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


def check_all_orders(rank: int) -> None:
    for names in itertools.permutations(("dp", "ep", "cp")):
        mesh = named(*names)
        left, num_taken = without(mesh._flatten("data"), mesh["ep"], [0])
        assert (left.shape, num_taken) == ((4,), 2)
        assert left.mesh_dim_names == ("_".join(name for name in names if name != "ep"),)
        here = (mesh.get_coordinate() or ())[names.index("ep")]
        assert [*left.layout.ranks] == mesh.mesh.select(names.index("ep"), here).flatten().tolist()
        joined = left.joined_with(mesh["ep"])
        assert joined is not None
        assert joined.shape == (4, 2)
        assert sorted(joined.layout.ranks) == [*range(8)]
        assert joined[left.mesh_dim_names[0]] == left
        assert joined["ep"] == mesh["ep"]


def check(rank: int) -> None:
    mesh = named("dp", "ep", "tp")
    data = mesh["dp", "ep"]._flatten("fsdp")
    assert without(data, mesh["ep"], [0]) == (mesh["dp"], 2)
    assert without(data, mesh["ep", "tp"], [0, 1]) == (mesh["dp"], 2)
    assert without(data, mesh["tp"], [0]) == (data, 1)
    # Axes that are not asked for stay.
    assert without(data, mesh["ep", "tp"], [1]) == (data, 1)
    assert without(mesh["dp", "ep"], mesh["ep"], [0])[0].shape == (2, 1)
    alone, num_taken = without(data, mesh["dp", "ep"], [0, 1])
    assert (alone.shape, num_taken, [*alone.layout.ranks]) == ((1,), 4, [rank])
    # An axis that only meets the mesh is no axis of it.
    across = disttrain.DeviceMesh("cpu", [rank, (rank + 3) % 8], mesh_dim_names=("across",))
    assert without(data, across, [0]) == (data, 1)


def run(function: str) -> None:
    {"orders": check_all_orders, "others": check}[function](disttrain.get_rank())


def test_an_axis_is_taken_out_wherever_it_lies() -> None:
    run_threads(8, run, "orders")


def test_what_does_not_lie_within_is_left_alone() -> None:
    run_threads(8, run, "others")
