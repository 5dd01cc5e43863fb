"""The doctor on real processes: what is fit is said to be, and a node that nobody can reach is named."""

from __future__ import annotations

import json
import socket
import subprocess
from typing import TYPE_CHECKING

from tests.surroundings.launching import LIMIT_S, environment, launcher

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

NUM_NODES = 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def doctor(server: ForkServer, *flags: str) -> list[str]:
    return [*launcher(server), "doctor", *flags, "--json"]


def report_of(output: str) -> dict[str, list[dict[str, str]]]:
    """Findings by topic."""
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(output)["findings"]:
        found.setdefault(finding["topic"], []).append(finding)
    return found


def test_ranks_of_one_node(fork_server: ForkServer) -> None:
    command = doctor(fork_server, "--nproc-per-node", "2")
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout
    found = report_of(done.stdout)
    assert {"versions", "host name", "cores", "shared memory", "open files", "all-reduce"} <= found.keys()
    assert len(found["cores"]) == 1  # once per node
    assert found["all-reduce"][0]["state"] == "good"
    assert found["all-reduce"][0]["value"].endswith(" GB/s on 2 ranks")


def test_started_by_itself_it_looks_at_this_machine(fork_server: ForkServer) -> None:
    done = fork_server.run("-m", "disttrain.doctor", "--json", environ=environment())
    assert done.returncode == 0, done.stderr
    assert {"versions", "host name", "cores", "open files"} <= report_of(done.stdout).keys()


def test_a_node_that_no_other_reaches_is_named(fork_server: ForkServer) -> None:
    port = free_port()
    agents = []
    for node in range(NUM_NODES):
        meeting = ("--nnodes", str(NUM_NODES), "--node-rank", str(node), "--master-port", str(port))
        argv = doctor(fork_server, *meeting)
        environ = {**environment(), **({"GLOO_SOCKET_IFNAME": "nosuch0"} if node == 2 else {})}
        agents.append(subprocess.Popen(argv, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    outputs = [agent.communicate(timeout=LIMIT_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [1, 1, 1]
    found = report_of(outputs[0])
    host = socket.gethostname()
    bad = [finding for finding in found["network"] if finding["state"] == "bad"]
    assert [finding["where"] for finding in bad] == [f"{host} (node 2)"]
    assert "GLOO_SOCKET_IFNAME names nosuch0" in bad[0]["value"]
    good = [finding for finding in found["network"] if finding["state"] == "good"]
    assert [finding["where"] for finding in good] == ["all nodes"]  # the other pair
    assert found["all-reduce"][0]["state"] == "bad"
    assert len(found["clock"]) == NUM_NODES - 1
