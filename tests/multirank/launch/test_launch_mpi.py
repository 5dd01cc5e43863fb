"""Real mpirun, which takes this machine for several: its way to another host is a shell that has changed its name."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.surroundings.programs import needs_root, program

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

AGENT = """\
#!/bin/sh
host=$1
shift
exec unshare --uts sh -c "hostname $host; $*"
"""
# In one piece: mpirun gives launchers a terminal, on which the beginning of a line would be shown before its end.
WORKER = """
    import os
    rank, node, world_size = [os.environ[name] for name in ("RANK", "GROUP_RANK", "WORLD_SIZE")]
    os.write(1, f"rank {rank} of {world_size} node {node}\\n".encode())
"""
ONE_EACH = ("--map-by", "ppr:1:node")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LIMIT_S = 240.0


def mpirun(launches: Launches, hosts: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Open MPI's; `argv` from its own flags on."""
    command = program("mpirun", "openmpi-bin")
    if "Open MPI" not in subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("the mpirun here is not Open MPI's (Debian: apt-get install openmpi-bin)")
    needs_root("give this machine a second name")
    agent = launches.folder / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    return subprocess.run(
        [command, "--host", hosts, "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", str(agent), *argv],
        cwd=launches.folder,
        env={**launches.environ(), "NO_COLOR": "1", **AS_ROOT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def launch(launches: Launches) -> tuple[str, ...]:
    launches.run("--new-token", "token")
    script = launches.script(WORKER)
    return (sys.executable, "-m", "disttrain_launch", "--token-file", "token", "--nproc-per-node", "2", script)


def test_mpirun_needs_no_flags_about_nodes(launches: Launches, launch: tuple[str, ...]) -> None:
    done = mpirun(launches, f"{socket.gethostname()}:1,other:1", *ONE_EACH, *launch)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] rank {rank} of 4 node {rank // 2}" for rank in range(4)]
    assert "disttrain-launch: Open MPI: 2 nodes, which meet at " in done.stderr


def test_where_mpirun_has_no_rank_the_address_is_asked_for(launches: Launches, launch: tuple[str, ...]) -> None:
    done = mpirun(launches, "one:1,other:1", *ONE_EACH, *launch)
    assert done.returncode == 2
    assert "Open MPI does not say where node 0 is. Give --master-addr HOST, the same on all nodes." in done.stderr
    with_address = (*launch[:3], "--master-addr", "127.0.0.1", *launch[3:])
    done = mpirun(launches, "one:1,other:1", *ONE_EACH, *with_address)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 4), done.stderr


def test_several_launchers_on_a_node_are_refused(launches: Launches, launch: tuple[str, ...]) -> None:
    done = mpirun(launches, f"{socket.gethostname()}:2", "-n", "2", *launch)
    assert done.returncode == 2
    assert "Open MPI starts 2 launchers on this node; one for each node is needed." in done.stderr
