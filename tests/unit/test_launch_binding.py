"""Where workers run: what is read of a machine, and which cores each worker gets of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_launch.workers.binding import Binding, Way, bindings, chosen_bindings, inherited_by_children
from disttrain_launch.workers.topology import Core, Topology, core_list, numbers_gpus, read_topology

# Two sockets of two NUMA nodes of two caches of two physical cores of two threads; siblings are 16 apart.
CORES = {
    thread * 16 + core: Core(numa_node=core // 4, socket=core // 8, complex=core // 2 * 2, physical=core)
    for thread in range(2)
    for core in range(16)
}
GPUS = Topology(CORES, (0, 0, 1, 3))


def cores_of(found: tuple[Binding | None, ...]) -> list[list[int]]:
    return [sorted(binding.cores) if binding else [] for binding in found]


def test_a_worker_gets_the_cores_of_its_gpus_node() -> None:
    found = bindings(GPUS, 4, Way.NODE)
    node = [0, 1, 2, 3, 16, 17, 18, 19]
    assert cores_of(found) == [node, node, [core + 4 for core in node], [core + 12 for core in node]]
    assert [binding.numa_nodes for binding in found if binding] == [{0}, {0}, {1}, {3}]


def test_a_socket_is_all_its_nodes() -> None:
    found = bindings(GPUS, 4, Way.SOCKET)
    assert cores_of(found)[0] == [*range(8), *range(16, 24)]
    assert found[3] == Binding(frozenset([*range(8, 16), *range(24, 32)]), frozenset({2, 3}))


def test_exclusive_shares_are_whole_physical_cores() -> None:
    assert cores_of(bindings(GPUS, 3, Way.EXCLUSIVE)) == [
        [0, 1, 16, 17],
        [2, 3, 18, 19],
        [4, 5, 6, 7, 20, 21, 22, 23],
    ]
    crowded = bindings(Topology(CORES, (0,)), 6, Way.EXCLUSIVE)
    assert cores_of(crowded) == [[0, 16], [0, 16], [1, 17], [2, 18], [2, 18], [3, 19]]


def test_core_complexes_take_turns() -> None:
    assert cores_of(bindings(GPUS, 3, Way.CORE_COMPLEX)) == [[0, 1, 16, 17], [2, 3, 18, 19], [4, 5, 20, 21]]
    # A cache of which this process may use one core only is not as good as a whole one.
    allowed = {number: core for number, core in CORES.items() if number not in (1, 16, 17)}
    assert cores_of(bindings(Topology(allowed, (0, 0)), 2, Way.CORE_COMPLEX)) == [[2, 3, 18, 19]] * 2


def test_unknown_places_and_forbidden_nodes_are_left_alone() -> None:
    assert bindings(Topology(CORES, (None, 2)), 2, Way.NODE)[0] is None
    allowed = {number: core for number, core in CORES.items() if core.numa_node != 1}
    assert bindings(Topology(allowed, (1, 3)), 2, Way.NODE)[0] is None


@given(num_workers=st.integers(1, 40), way=st.sampled_from(Way), with_gpus=st.booleans())
def test_every_worker_gets_cores_and_no_core_is_idle(num_workers: int, way: Way, with_gpus: bool) -> None:
    found = bindings(Topology(CORES, (0, 1, 2, 3) if with_gpus else ()), num_workers, way)
    assert all(binding is not None and binding.cores for binding in found)
    if num_workers >= 4 and way is not Way.CORE_COMPLEX:
        assert frozenset().union(*(binding.cores for binding in found if binding)) == frozenset(CORES)
    if way is Way.EXCLUSIVE and num_workers <= 4:
        assert sum(len(binding.cores) for binding in found if binding) == len(
            frozenset().union(*(binding.cores for binding in found if binding))
        )


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The files of a machine with two nodes of two cores, and three GPUs."""

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    for node in range(2):
        write(f"sys/devices/system/node/node{node}/cpulist", f"{2 * node}-{2 * node + 1}")
    for core in range(4):
        folder = f"sys/devices/system/cpu/cpu{core}"
        write(f"{folder}/topology/physical_package_id", str(core // 2))
        write(f"{folder}/topology/thread_siblings_list", str(core))
        write(f"{folder}/cache/index3/shared_cpu_list", f"{core // 2 * 2}-{core // 2 * 2 + 1}")
    for bus, node in (("0000:1B:00.0", 1), ("0000:0a:00.0", 0), ("0001:00:00.0", -1)):
        write(f"proc/driver/nvidia/gpus/{bus}/information", f"Model: \t\t H200\nGPU UUID: \t GPU-{bus[5:7]}-42\n")
        write(f"sys/bus/pci/devices/{bus.lower()}/numa_node", str(node))
    return tmp_path


def test_a_machine_is_read(machine: Path) -> None:
    found = read_topology({}, frozenset({0, 2, 3}), machine)
    assert found.cores == {0: Core(0, 0, 0, 0), 2: Core(1, 1, 2, 2), 3: Core(1, 1, 2, 3)}
    assert found.gpu_numa_nodes == (0, 1, None)
    assert found.num_numa_nodes == 2


@pytest.mark.parametrize(
    ("visible", "nodes"), [("1,0", (1, 0)), ("GPU-1B-42", (1,)), ("MIG-7,0", (None, 0)), ("", ()), ("7", (None,))]
)
def test_only_visible_gpus_count(machine: Path, visible: str, nodes: tuple[int | None, ...]) -> None:
    found = read_topology({"CUDA_VISIBLE_DEVICES": visible}, frozenset(range(4)), machine)
    assert found.gpu_numa_nodes == nodes


def test_a_part_of_the_gpus_may_be_numbered_anew(machine: Path) -> None:
    assert numbers_gpus({}, machine)
    assert numbers_gpus({"CUDA_VISIBLE_DEVICES": "2,1,0"}, machine)
    assert numbers_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1B-42"}, machine)
    assert not numbers_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, machine)
    assert not numbers_gpus({}, machine / "sys")


def test_a_machine_that_says_nothing_is_one_node(tmp_path: Path) -> None:
    found = read_topology({}, frozenset({0, 1}), tmp_path)
    assert found == Topology({0: Core(0, 0, 0, 0), 1: Core(0, 0, 1, 1)}, ())


def test_lists_of_cores() -> None:
    assert core_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert core_list("\n") == []


def test_without_gpus_nobody_is_bound_unless_it_is_asked_for() -> None:
    if not numbers_gpus({}):
        assert chosen_bindings("auto", 2, {}) == (None, None)
    assert chosen_bindings("none", 2, {}) == (None, None)
    for way in Way:
        found = chosen_bindings(way.value, 2, {"CUDA_VISIBLE_DEVICES": ""})
        assert all(binding is not None and binding.cores <= os.sched_getaffinity(0) for binding in found)


def test_what_is_started_is_bound_and_the_starter_is_not() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    with inherited_by_children(Binding(frozenset({one}), frozenset({0}))):
        program = "import os; print(*os.sched_getaffinity(0)); print(open('/proc/self/numa_maps').readline())"
        told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    cores, memory = told.stdout.splitlines()[:2]
    assert cores == str(one)
    assert "prefer" in memory or "default" in memory
    assert os.sched_getaffinity(0) == before
