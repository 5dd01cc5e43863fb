"""A Slurm of a test's own: its daemons on this machine, as two nodes with addresses that lead back to it.

Slurm's documentation: "Multiple slurmd support". Names of nodes are loopback addresses, so that what a launcher reads
in a list of hosts is where another finds it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.surroundings.programs import needs_root, program

NODES = ("127.0.0.1", "127.0.0.2")
LIMIT_S = 90.0
_LINES = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0
ReturnToService=2
KillWait=5
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """`environ` has what its commands need."""

    environ: dict[str, str]


@contextmanager
def slurm_cluster() -> Iterator[Slurm]:
    """Daemons start, and end with the context. Skips where Slurm is not installed, or must not be run."""
    daemons = {name: program(name, "slurm-wlm") for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch")}
    needs_root("run Slurm's daemons")
    with ExitStack() as cleanup:
        # A socket's path must be short, which pytest's folders are not.
        folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        _configure(folder)

        def start(*command: str) -> None:
            with open(folder / "log", "ab") as log:
                daemon = subprocess.Popen(
                    command,
                    env={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            cleanup.callback(_end, daemon)

        socket_path = folder / "munge.socket"
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        start(daemons["munged"], "--foreground", "--force", f"--socket={socket_path}", *files)
        _wait(socket_path.exists, folder)
        start(daemons["slurmctld"], "-D", "-i")
        for node in NODES:
            start(daemons["slurmd"], "-D", "-N", node)
        environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        _wait(lambda: _num_idle(environ) == len(NODES), folder)
        yield Slurm(environ)


def _configure(folder: Path) -> None:
    folder.chmod(0o755)  # munged wants to be sure that nobody else can write here
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(64))
    (folder / "state").mkdir()
    host = socket.gethostname()
    ports = iter(_free_ports(1 + len(NODES)))
    lines = _LINES.format(host=host, folder=folder, port=next(ports))
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
        where = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={next(ports)}"
        lines += f"NodeName={node} {where} CPUs={os.cpu_count()} RealMemory=1000\n"
    (folder / "slurm.conf").write_text(lines)


def _free_ports(num_ports: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num_ports)]
        return [int(listener.getsockname()[1]) for listener in listeners]


def _num_idle(environ: dict[str, str]) -> int:
    command = [program("sinfo", "slurm-wlm"), "--noheader", "--Node", "--states=idle"]
    asked = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    return len(asked.stdout.splitlines())


def _wait(is_there: Callable[[], bool], folder: Path) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not is_there():
        assert time.monotonic() < until_s, (folder / "log").read_text()
        time.sleep(0.1)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(60)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
