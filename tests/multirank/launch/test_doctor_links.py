"""The doctor measures what nodes have between each other: hosts of our own, whose packets are late by so much."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from disttrain.doctor.links import read_links
from disttrain.plan import HARDWARE
from tests.forkserver.host import server_in_host
from tests.surroundings.launching import launcher_at
from tests.surroundings.network_hosts import OWN_FOLDER, Weather, network_hosts

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer
    from tests.multirank.launch.conftest import Launches

NAMES = ("host-a", "host-b", "host-c")
DELAY_S = 5e-3
SMALL_MESSAGES = """
from disttrain.doctor import link_speeds, network
link_speeds.LARGE_BYTES = network.PAIR_BYTES = network.WHOLE_BYTES = 2 << 20
"""
"""What is large goes through a switch that is written in Python."""


def test_late_packets_are_found_in_the_file_of_links(
    launches: Launches, fork_server: ForkServer, tmp_path: Path
) -> None:
    launches.run("--new-token", "token")
    with network_hosts(tmp_path, *NAMES) as hosts:
        hosts.switch.weather = Weather(delay_s=DELAY_S)
        nodes = []
        for number, name in enumerate(NAMES):
            host = hosts.start(name)
            meeting = ("--nnodes", "3", "--node-rank", str(number), "--rdzv-endpoint", f"{NAMES[0]}:29500")
            launcher = launcher_at(server_in_host(fork_server, host.pid, SMALL_MESSAGES))
            command = [*launcher, "doctor", *meeting, "--token-file", "token"]
            own = ["--nproc-per-node", "2", "--links", "links.json"]
            environ = {**launches.environ(), "TMPDIR": OWN_FOLDER, "OMP_NUM_THREADS": "1"}
            nodes.append(host.start([*command, *own], environ, launches.folder))
            launches.started.append(nodes[-1])
        ended = [launches.end(node) for node in nodes]
    links = read_links(launches.folder / "links.json")
    assert "by gloo" in ended[0].stdout, ended[0].stderr
    assert (links.transport, links.hosts, links.num_ranks) == ("gloo", NAMES, 2)
    assert [(pair.first, pair.second) for pair in links.pairs] == [(0, 1), (0, 2), (1, 2)]
    assert all(DELAY_S < pair.latency_s < 20 * DELAY_S for pair in links.pairs), links
    # A gather of three ranks has two hops.
    assert links.gather_s > 2 * DELAY_S
    assert HARDWARE["h100"].with_links(links).network_latency_s > DELAY_S
