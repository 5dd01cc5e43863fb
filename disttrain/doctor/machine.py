"""Checks one machine. Each check is a pure function of what `look` has read; torch-free."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from disttrain.console import size_text
from disttrain.devices import num_gpus as num_visible_gpus
from disttrain.doctor.findings import Finding, State
from disttrain.settings import environment
from disttrain.version import __version__

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  that is what it is called
GIB = 1 << 30
LEAST_SHARED = 1 * GIB
LEAST_FREE = 2 * GIB
LEAST_FILES = 4096
UNLIMITED = -1


@dataclass(frozen=True)
class Machine:
    """Facts about a machine. Sizes in bytes, -1: unlimited; None: the machine does not say."""

    host: str
    addresses: tuple[str, ...] | None
    """Addresses of the host's name."""
    own_address: str
    """Whence it reaches the job's first node; empty on that node alone, or without a way."""
    interface: str
    has_others: bool
    num_cores: int
    cpu_quota: float | None
    """Cores that the control group grants."""
    load: float
    available_bytes: int | None
    shared_bytes: int | None
    temporary_bytes: int
    max_files: int
    max_processes: int
    max_locked_bytes: int
    num_gpus: int
    """Those that torch can use."""
    num_visible: int
    """Those that the driver shows to this process."""
    driver: str
    infiniband: tuple[str, ...]


def look(first_node: str | None, num_gpus: int) -> Machine:
    """Read this machine.

    Args:  first_node  the name or address of the first one, where there are others;  num_gpus  those torch can use.
    """
    host = socket.gethostname()
    own_address = _address_towards(first_node) if first_node else ""
    return Machine(
        host=host,
        addresses=_resolved(host),
        own_address=own_address,
        interface=_interface_of(own_address),
        has_others=first_node is not None,
        num_cores=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(Path("/sys/fs/cgroup/cpu.max")),
        load=os.getloadavg()[0],
        available_bytes=_available_bytes(Path("/proc/meminfo")),
        shared_bytes=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None,
        temporary_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        max_processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        max_locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        num_gpus=num_gpus,
        num_visible=num_visible_gpus(environment()),
        driver=_driver(Path("/proc/driver/nvidia/version")),
        infiniband=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
    )


def examine(machine: Machine) -> list[Finding]:
    """Runs all checks, in the order of the table."""
    return [finding for check in _CHECKS for finding in check(machine)]


def _name(machine: Machine) -> Iterator[Finding]:
    if machine.addresses is None:
        yield Finding(
            "host name",
            State.BAD if machine.has_others else State.DOUBTFUL,
            f"{machine.host} does not resolve",
            f"Add {machine.host} to DNS or /etc/hosts, or name the interface: GLOO_SOCKET_IFNAME.",
        )
        return
    value = f"{machine.host} is {', '.join(machine.addresses)}"
    is_apart = all(is_loopback(address) for address in machine.addresses)
    if machine.has_others and is_apart and not is_loopback(machine.own_address):
        # Gloo listens where the host's name leads, unless it is told an interface.
        yield Finding(
            "host name",
            State.DOUBTFUL,
            f"{value}, where other nodes cannot come",
            f"Set GLOO_SOCKET_IFNAME={machine.interface or 'to the interface'}, or mend /etc/hosts.",
        )
        return
    yield Finding("host name", State.GOOD, value)


def _way(machine: Machine) -> Iterator[Finding]:
    if not machine.has_others:
        return
    if not machine.own_address:
        yield Finding("way to node 0", State.BAD, "none", "Look at the routes (ip route) and at --master-addr.")
        return
    yield Finding("way to node 0", State.GOOD, f"by {machine.interface or 'an unnamed interface'}")


def _cores(machine: Machine) -> Iterator[Finding]:
    value = f"{machine.num_cores}"
    if machine.cpu_quota is not None and machine.cpu_quota < machine.num_cores:
        yield Finding(
            "cores",
            State.DOUBTFUL,
            f"{value}, of which the container may use {machine.cpu_quota:g} at a time",
            "Threads are made for all that are seen: set OMP_NUM_THREADS, or give the container whole cores.",
        )
    elif machine.load > 1.5 * machine.num_cores:
        yield Finding("cores", State.DOUBTFUL, f"{value}, load {machine.load:.1f}", "See what else runs there (top).")
    else:
        yield Finding("cores", State.GOOD, value)


def _memory(machine: Machine) -> Iterator[Finding]:
    if machine.available_bytes is not None:
        state = State.GOOD if machine.available_bytes >= LEAST_FREE else State.DOUBTFUL
        remedy = "" if state is State.GOOD else "See what takes it (top); torch alone takes 0.5 GiB per worker."
        yield Finding("free memory", state, size_text(machine.available_bytes), remedy)
    if machine.shared_bytes is not None:
        state = State.GOOD if machine.shared_bytes >= LEAST_SHARED else State.DOUBTFUL
        remedy = (
            "" if state is State.GOOD else "Data loaders and NCCL need it: docker run --shm-size=16g, or --ipc=host."
        )
        yield Finding("shared memory", state, size_text(machine.shared_bytes), remedy)


def _disk(machine: Machine) -> Iterator[Finding]:
    state = State.GOOD if machine.temporary_bytes >= LEAST_FREE else State.DOUBTFUL
    remedy = "" if state is State.GOOD else "Make room, or set TMPDIR to another folder."
    yield Finding("free for temporary files", state, size_text(machine.temporary_bytes), remedy)


def _limits(machine: Machine) -> Iterator[Finding]:
    if 0 <= machine.max_files < LEAST_FILES:
        yield Finding(
            "open files",
            State.DOUBTFUL,
            str(machine.max_files),
            f"Each pair of ranks takes sockets: ulimit -n {LEAST_FILES} or more.",
        )
    else:
        yield Finding("open files", State.GOOD, _limit_text(machine.max_files))
    if 0 <= machine.max_processes < 4096:
        yield Finding(
            "processes", State.DOUBTFUL, str(machine.max_processes), "Threads count as well: ulimit -u 65536."
        )
    if machine.infiniband and machine.max_locked_bytes != UNLIMITED:
        yield Finding(
            "locked memory",
            State.DOUBTFUL,
            size_text(machine.max_locked_bytes),
            "InfiniBand registers memory: ulimit -l unlimited; in a container --ulimit memlock=-1.",
        )


def _devices(machine: Machine) -> Iterator[Finding]:
    driver = f"driver {machine.driver or 'unknown'}"
    if machine.num_gpus:
        yield Finding("GPUs", State.GOOD, f"{machine.num_gpus}, {driver}")
    elif machine.driver and machine.num_visible:
        yield Finding(
            "GPUs",
            State.BAD,
            f"{machine.num_visible}, {driver}; torch can use none",
            "Install a build of torch for the driver's version of CUDA (nvidia-smi shows it).",
        )
    elif machine.driver:
        yield Finding(
            "GPUs",
            State.DOUBTFUL,
            f"0, {driver}",
            "There is a driver, but no GPU is visible: CUDA_VISIBLE_DEVICES, docker --gpus.",
        )
    if machine.infiniband:
        yield Finding("InfiniBand", State.GOOD, ", ".join(machine.infiniband))


_CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _name, _way, _cores, _memory, _disk, _limits, _devices,
)  # fmt: skip


def versions(torch_version: str) -> str:
    return f"disttrain {__version__}, torch {torch_version}, Python {platform.python_version()}"


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)


def _resolved(host: str) -> tuple[str, ...] | None:
    try:
        return tuple(sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}))
    except OSError:
        return None


def _address_towards(host: str) -> str:
    """The address that packets to `host` leave from; nothing is sent."""
    try:
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, _, _, address in candidates:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return ""


def _interface_of(address: str) -> str:
    """Source: Linux manual page netdevice(7), SIOCGIFADDR."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _cpu_quota(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _available_bytes(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _driver(path: Path) -> str:
    try:
        text = path.read_text()
    except OSError:
        return ""
    words = text.split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "")
