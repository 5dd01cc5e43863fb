"""Hosts of a test's own: namespaces of Linux, each with its processes, its name, its address and its /dev/shm.

What one host sends another passes a thread of this process, which delays it, loses some, or lets nothing through: so no
kernel needs the queueing disciplines (netem) that would do the same. A host's link is a tun device, which is made here
and then moved into the host. Sources: namespaces(7), the kernel's "Universal TUN/TAP device driver".
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import secrets
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
OWN_FOLDER = "/dev/shm"  # noqa: S108  each host has one of its own
"""A folder that goes with the host; all others are shared by the hosts."""
_MTU_BYTES = 9000
_DEVICE = "eth0"
_READ_BYTES = 1 << 16
_LAST_BYTE_OF_DESTINATION = 19  # of an IPv4 header


@dataclass
class Weather:
    """What packets between hosts meet: each is late by `delay_s`, and lost with this probability. What a host sends
    leaves it at `bytes_per_s`, one packet after another; 0: as fast as this process carries them."""

    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 0.0


class Switch:
    """Carries packets between the hosts' devices, in a thread; a host that is cut off sends and gets none.

    Args: seed  of which packets are lost.
    """

    def __init__(self, seed: int = 0) -> None:
        self.weather = Weather()
        self._cut_off: set[int] = set()
        self._draw = random.Random(seed)
        self._fds: dict[int, int] = {}
        """By the host's number."""
        self._late: list[tuple[float, int, int, bytes]] = []
        self._num_packets = 0
        self._sent_at_s: dict[int, float] = {}
        """By the host's number, when its last packet has left, where that takes time."""
        self._woken, self._wake = os.pipe()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def plug_in(self, number: int, fd: int) -> None:
        """Carry this device's packets; it is closed here, when its host is gone."""
        self._fds[number] = fd
        os.write(self._wake, b"!")

    def cut_off(self, host: Host) -> None:
        self._cut_off.add(host.number)

    def mend(self, host: Host) -> None:
        self._cut_off.discard(host.number)

    def close(self) -> None:
        self._is_closed = True
        os.write(self._wake, b"!")
        self._thread.join()
        for fd in (*self._fds.values(), self._woken, self._wake):
            os.close(fd)

    def _run(self) -> None:
        while not self._is_closed:
            sources = {fd: number for number, fd in list(self._fds.items())}
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready, _, _ = select.select([self._woken, *sources], [], [], wait_s)
            for fd in ready:
                if fd == self._woken:
                    os.read(fd, _READ_BYTES)
                else:
                    self._take(fd, sources[fd])
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, number, packet = heapq.heappop(self._late)
                self._hand_over(number, packet)

    def _take(self, fd: int, source: int) -> None:
        try:
            packet = os.read(fd, _READ_BYTES)
        except OSError:
            packet = b""
        if not packet:  # The host is gone, and its device with it.
            if self._fds[source] == fd:
                del self._fds[source]
            os.close(fd)
            return
        if packet[0] >> 4 != 4:
            return
        number = packet[_LAST_BYTE_OF_DESTINATION]
        if number not in self._fds or self._cut_off & {source, number} or self._draw.random() < self.weather.loss:
            return
        weather = self.weather
        # In order: what came before may still be on its way, from when the weather was worse.
        if not (weather.delay_s or weather.bytes_per_s or self._late):
            self._hand_over(number, packet)
            return
        due_s = time.monotonic()
        if weather.bytes_per_s:
            due_s = max(due_s, self._sent_at_s.get(source, 0.0)) + len(packet) / weather.bytes_per_s
            self._sent_at_s[source] = due_s
        self._num_packets += 1
        heapq.heappush(self._late, (due_s + weather.delay_s, self._num_packets, number, packet))

    def _hand_over(self, number: int, packet: bytes) -> None:
        try:
            os.write(self._fds[number], packet)
        except (KeyError, OSError):
            return  # Its host is gone, or takes no more at the moment: packets may get lost.


@dataclass
class Host:
    """A running host; `number` is the last part of its address."""

    name: str
    number: int
    _holder: subprocess.Popen[bytes]
    pid: int
    """Of its first process, as we see it."""

    @property
    def address(self) -> str:
        return _address(self.number)

    @property
    def is_running(self) -> bool:
        return self._holder.poll() is None

    def start(self, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
        """A process of this host; it ends with it, as all others."""
        return subprocess.Popen(
            ["nsenter", "--target", str(self.pid), "--all", f"--wd={folder}", *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self) -> None:
        """Its processes end: the kernel kills them with the first one. To who is cut off, it says no farewell."""
        self._holder.kill()
        os.kill(self.pid, 9)
        self._holder.communicate()


@dataclass
class Hosts:
    """Those of a test, on one switch; their names lead to their addresses."""

    names: tuple[str, ...]
    switch: Switch
    _folder: Path
    _running: dict[str, Host] = field(default_factory=dict)

    def start(self, name: str) -> Host:
        """Start a host, or start it again."""
        number = self.names.index(name) + 1
        device = f"dt{secrets.token_hex(4)}"
        fd = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
        setup = f"hostname {name} && mount --bind {self._folder}/hosts /etc/hosts && mount -t tmpfs none {OWN_FOLDER}"
        holder = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", f"{setup} && echo ready && exec cat"],
            stdin=subprocess.PIPE,  # it ends with us, however we end
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        pid = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
        subprocess.run(["ip", "link", "set", device, "netns", str(pid)], check=True)
        up = [
            f"ip link set {device} name {_DEVICE}",
            "ip link set lo up",
            f"ip addr add {_address(number)}/24 dev {_DEVICE}",
            f"ip link set {_DEVICE} up mtu {_MTU_BYTES}",
        ]
        subprocess.run(["nsenter", "--target", str(pid), "--net", "sh", "-c", " && ".join(up)], check=True)
        self.switch.plug_in(number, fd)
        host = self._running[name] = Host(name, number, holder, pid)
        return host

    def running(self, name: str) -> Host | None:
        """The host of this name, while it runs."""
        host = self._running.get(name)
        return host if host is not None and host.is_running else None

    def kill(self, name: str) -> None:
        """It may be gone already."""
        if (host := self.running(name)) is not None:
            host.kill()

    def close(self) -> None:
        for name in self.names:
            self.kill(name)
        self.switch.close()


def _address(number: int) -> str:
    return f"10.77.0.{number}"


def lacking() -> str:
    """Why hosts cannot be made here; nothing: they can be."""
    if os.geteuid() != 0:
        return "only root can make hosts of namespaces"
    for name in ("unshare", "nsenter", "mount", "hostname", "ip"):
        if shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])) is None:
            return f"there is no {name} here (Debian: apt-get install util-linux hostname iproute2)"
    if not os.access(_TUN, os.W_OK):
        return f"there is no {_TUN} here"
    if subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], check=False, capture_output=True).returncode:
        return "namespaces cannot be made here"
    return ""


@contextmanager
def hosts_in(folder: Path, *names: str) -> Iterator[Hosts]:
    """Hosts that can be started, where nothing is `lacking`; `folder` is for what they read."""
    lines = ["127.0.0.1 localhost", *(f"{_address(number)} {name}" for number, name in enumerate(names, 1))]
    (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
    with ExitStack() as cleanup:
        hosts = Hosts(names, Switch(), folder)
        cleanup.callback(hosts.close)
        yield hosts


@contextmanager
def network_hosts(folder: Path, *names: str) -> Iterator[Hosts]:
    """The same; skips where this machine has no namespaces or devices for them."""
    if reason := lacking():
        pytest.skip(reason)
    with hosts_in(folder, *names) as hosts:
        yield hosts
