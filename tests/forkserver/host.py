"""A fork server in a host of a test's own (`surroundings/network_hosts.py`), forked by one outside.

It joins the host's namespaces, and listens there: an abstract address is known within one network alone. It ends with
the host. Source: setns(2).
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

from tests.forkserver.process import WRITERS, ForkServer
from tests.forkserver.server import serve

_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Of mounts, names, shared memory, processes and networks (linux/sched.h)."""


def server_in_host(server: ForkServer, pid: int, prepare: str = "") -> str:
    """The address of a new fork server in the host that this process belongs to.

    Args: prepare  Python that it runs before it forks.
    """
    address = f"{server.address}-{pid}"
    variables = {name: value for name, value in os.environ.items() if name != WRITERS}  # whom nobody reaches from there
    program = f"{prepare}\nfrom tests.forkserver.host import main\nmain()"
    script = server.start("-c", program, str(pid), address, environ=variables)
    assert script.stdout is not None
    assert script.stderr is not None
    said = script.stdout.readline()
    assert said == "listens\n", script.stderr.read()
    script.close()
    return address


def main() -> None:
    """What runs in it; its arguments are the process and the address."""
    pid, address = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(int(pid)), _NAMESPACES):
        raise OSError(ctypes.get_errno(), "setns")
    if os.fork():
        os._exit(os.EX_OK)  # whoever joins a namespace of processes is not in it; its children are
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{address}")
    listener.listen()
    owner, _held = socket.socketpair()  # nobody asks it to end
    print("listens", flush=True)
    serve(owner, listener)
