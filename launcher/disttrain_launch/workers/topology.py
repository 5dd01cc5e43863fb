"""Reads this machine's topology, as far as it matters where a worker runs: cores, NUMA nodes, and GPUs near them.

Read from Linux's /sys and /proc. Sources: kernel documentation, "ABI/stable/sysfs-devices-node",
"admin-guide/cputopology"; NVIDIA's driver README, chapter "Using the /proc File System Interface".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from disttrain import settings

GPU_FOLDER = "proc/driver/nvidia/gpus"


@dataclass(frozen=True)
class Core:
    """A logical core: a hardware thread that the system schedules on."""

    numa_node: int
    socket: int
    complex: int
    """The lowest logical core with which it shares its last-level cache."""
    physical: int
    """The lowest logical core that is the same physical one."""


@dataclass(frozen=True)
class Topology:
    cores: Mapping[int, Core]
    """By the system's number, those that this process may run on."""
    gpu_numa_nodes: tuple[int | None, ...]
    """Of each GPU that workers see, in their order; None where the machine does not say."""

    @property
    def num_numa_nodes(self) -> int:
        return len({core.numa_node for core in self.cores.values()})


def numbers_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """True when it is sure which GPUs workers see: a part of them may be numbered from 0 within a control group."""
    num_installed = len(list((root / GPU_FOLDER).glob("*")))
    entries = [entry for entry in environ.get(settings.VISIBLE_GPUS.name, "").split(",") if entry.strip()]
    are_numbers = any(entry.strip().isdigit() for entry in entries)
    return num_installed > 0 and not (are_numbers and len(entries) < num_installed)


def read_topology(environ: Mapping[str, str], allowed: frozenset[int], root: Path = Path("/")) -> Topology:
    """This machine's, for workers with this environment. `allowed`: the logical cores that they may use."""
    system = root / "sys" / "devices" / "system"
    numa_node_of = {
        core: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for core in core_list(_text(folder / "cpulist"))
    }
    cores = {core: _core(system / "cpu" / f"cpu{core}", core, numa_node_of.get(core, 0)) for core in sorted(allowed)}
    return Topology(cores, _gpu_numa_nodes(environ, root))


def core_list(text: str) -> list[int]:
    """Parses a list of cores as the kernel writes it: `0-3,8,10-11`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part.strip()]
    return [core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)]


def _core(folder: Path, number: int, numa_node: int) -> Core:
    shares = [folder / "cache" / f"index{level}" / "shared_cpu_list" for level in (3, 2)]
    together = next((core_list(text) for path in shares if (text := _text(path))), None)
    same = core_list(_text(folder / "topology" / "thread_siblings_list"))
    return Core(
        numa_node=numa_node,
        socket=int(_text(folder / "topology" / "physical_package_id") or 0),
        complex=min(together or [number]),
        physical=min(same or [number]),
    )


def _gpu_numa_nodes(environ: Mapping[str, str], root: Path) -> tuple[int | None, ...]:
    # NVIDIA numbers GPUs by bus address where they are alike, as those of a training node are.
    addresses = sorted(path.name for path in (root / GPU_FOLDER).glob("*") if path.is_dir())
    visible = environ.get(settings.VISIBLE_GPUS.name)
    entries = [str(index) for index in range(len(addresses))] if visible is None else visible.split(",")
    return tuple(_numa_node(_address(entry.strip(), addresses, root), root) for entry in entries if entry.strip())


def _address(entry: str, addresses: list[str], root: Path) -> str | None:
    if re.fullmatch(r"\d+", entry):
        return addresses[int(entry)] if int(entry) < len(addresses) else None
    if not entry.startswith("GPU-"):
        return None
    for address in addresses:
        match = re.search(r"GPU UUID:\s*(\S+)", _text(root / GPU_FOLDER / address / "information"))
        if match is not None and match[1].startswith(entry):
            return address
    return None


def _numa_node(address: str | None, root: Path) -> int | None:
    if address is None:
        return None
    # -1: the firmware does not say.
    node = _text(root / "sys/bus/pci/devices" / address.lower() / "numa_node").strip()
    return int(node) if re.fullmatch(r"\d+", node) else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
