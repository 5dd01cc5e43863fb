"""Binds each worker of a node to cores and memory: those near its GPU.

The ways to bind are torchrun's (torch's documentation, "NUMA Binding"): all cores of the GPU's NUMA node, all of its
socket, a share of the node's that no other worker has, or one group of cores with a common cache.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from disttrain_launch.workers.topology import Topology, numbers_gpus, read_topology

AUTO, NONE = "auto", "none"
"""By node where there are GPUs and several NUMA nodes, else not at all; not at all."""


class Way(Enum):
    """A way to bind workers."""

    NODE = "node"
    SOCKET = "socket"
    EXCLUSIVE = "exclusive"
    CORE_COMPLEX = "core-complex"


@dataclass(frozen=True)
class Binding:
    cores: frozenset[int]
    """Logical cores."""
    numa_nodes: frozenset[int]
    """Where its memory comes from, as long as there is any."""


def bindings(topology: Topology, num_workers: int, way: Way) -> tuple[Binding | None, ...]:
    """By local rank: worker k is bound near the k-th GPU. None where it is not known which cores these are.

    Without GPUs, workers are spread evenly over the NUMA nodes.
    """
    homes = _homes(topology, num_workers)
    return tuple(
        None if home is None else _binding(topology, way, home, position, homes.count(home))
        for home, position in zip(homes, _positions(homes), strict=True)
    )


def chosen_bindings(choice: str, num_workers: int, environ: Mapping[str, str]) -> tuple[Binding | None, ...]:
    """By local rank, for workers with this environment on this machine. `choice`: AUTO, NONE or a way."""
    unbound = (None,) * num_workers
    if choice == NONE or (choice == AUTO and (not numbers_gpus(environ) or _has_memory_policy())):
        return unbound
    topology = read_topology(environ, frozenset(os.sched_getaffinity(0)))
    if choice == AUTO and topology.num_numa_nodes == 1:
        return unbound
    return bindings(topology, num_workers, Way.NODE if choice == AUTO else Way(choice))


@contextmanager
def inherited_by_children(binding: Binding | None) -> Iterator[None]:
    """Binds what this thread starts meanwhile, from its first instruction on; afterwards the thread is as before."""
    if binding is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, binding.cores)
    _prefer_memory_of(binding.numa_nodes)
    try:
        yield
    finally:
        _prefer_memory_of(frozenset())
        os.sched_setaffinity(0, before)


def _homes(topology: Topology, num_workers: int) -> Sequence[int | None]:
    """The NUMA node of each worker."""
    nodes = sorted({core.numa_node for core in topology.cores.values()})
    gpus = topology.gpu_numa_nodes
    if not gpus:
        return [nodes[worker * len(nodes) // num_workers] for worker in range(num_workers)]
    near = [gpus[worker % len(gpus)] for worker in range(num_workers)]
    return [node if node in nodes else None for node in near]


def _positions(homes: Sequence[int | None]) -> list[int]:
    """The number of earlier workers with the same home, for each."""
    return [homes[:worker].count(home) for worker, home in enumerate(homes)]


def _binding(topology: Topology, way: Way, home: int, position: int, num_sharing: int) -> Binding:
    near = {number: core for number, core in topology.cores.items() if core.numa_node == home}
    if way is Way.SOCKET:
        sockets = {core.socket for core in near.values()}
        near = {number: core for number, core in topology.cores.items() if core.socket in sockets}
        return Binding(frozenset(near), frozenset(core.numa_node for core in near.values()))
    if way is Way.EXCLUSIVE:
        physical = sorted({core.physical for core in near.values()})
        # With more workers than cores, neighbours share one.
        first, last = (len(physical) * edge // num_sharing for edge in (position, position + 1))
        cores = set(physical[first : max(last, first + 1)])
        near = {number: core for number, core in near.items() if core.physical in cores}
    if way is Way.CORE_COMPLEX:
        sizes: dict[int, int] = {}
        for core in near.values():
            sizes[core.complex] = sizes.get(core.complex, 0) + 1
        largest = sorted(group for group, size in sizes.items() if size == max(sizes.values()))
        chosen = largest[position % len(largest)]
        near = {number: core for number, core in near.items() if core.complex == chosen}
    return Binding(frozenset(near), frozenset({home}))


_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MPOL_DEFAULT, _MPOL_PREFERRED_MANY = 0, 5
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def _has_memory_policy() -> bool:
    """True when somebody, such as numactl, has set a policy for memory already. Source: get_mempolicy(2)."""
    call, mode = _GET_MEMPOLICY.get(platform.machine()), ctypes.c_int()
    if call is None or ctypes.CDLL(None).syscall(call, ctypes.byref(mode), None, 0, None, 0) != 0:
        return False
    return mode.value != _MPOL_DEFAULT


def _prefer_memory_of(numa_nodes: frozenset[int]) -> None:
    """Source: Linux manual page set_mempolicy(2). Where the kernel refuses, memory is near anyway: it comes from the
    node of the core that touches it first."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        return
    words = (ctypes.c_ulong * (max(numa_nodes, default=0) // _BITS + 1))()
    for node in numa_nodes:
        words[node // _BITS] |= 1 << node % _BITS
    mode = _MPOL_PREFERRED_MANY if numa_nodes else _MPOL_DEFAULT
    ctypes.CDLL(None).syscall(call, mode, words if numa_nodes else None, len(words) * _BITS + 1 if numa_nodes else 0)
