"""Training between hosts that a slow network joins, ours and torch's in turns: ranks on CPUs, over Gloo.

    python benchmarks/network.py [--ranks 2 4] [--delays 0 0.2 1 10] [--mbit 0] [--parallelisms fsdp tp] [--json FILE]

Each host is a namespace of Linux with an address of its own (`tests/surroundings/network_hosts.py`); what one sends
another is late by so many milliseconds each way, and leaves its host at so many megabits a second (0: as fast as it is
carried). fsdp, tp and pp have a rank on each host; hsdp and 2d have two, of which the inner axis is made. A step is a
forward, a backward and AdamW's step of a small Llama, of the slowest rank. It takes root, /dev/net/tun and iproute2.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import command_line, table
from networks import job
from networks.job import Listener, command, environment, joined, keep, tell_starter
from networks.sides import in_pairs
from networks.turns import Weather, add_options, run

from disttrain.store import write_token

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.surroundings.network_hosts import hosts_in, lacking  # noqa: E402  it lies beside this folder

PORT = 29500
"""Of our store, in hosts where nobody else listens."""


def be_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with joined(options):
        run(options, Weather(options.delays[0], options.mbit[0]), tell_starter)


def play(hosts_of_ranks: list[str], parallelisms: list[str], weather: Weather, to: Listener, num_jobs: int) -> None:
    """A job with a rank on each of the named hosts, the first of so many that are to come, and what it tells. The
    weather is there from its start, since ranks measure their network once."""
    names = list(dict.fromkeys(hosts_of_ranks))
    ranks_per_host = len(hosts_of_ranks) // len(names)
    seconds = to.share_s(num_jobs)
    told = ["--parallelisms", *parallelisms, "--delays", str(weather.delay_ms), "--mbit", str(weather.mbit_s)]
    words = command(ranks_per_host, seconds, *told)
    with tempfile.TemporaryDirectory() as folder, hosts_in(Path(folder), *names) as hosts:
        hosts.switch.weather.delay_s = (weather.delay_ms or 0.0) / 1e3
        hosts.switch.weather.bytes_per_s = weather.mbit_s * 1e6 / 8
        running = {name: hosts.start(name) for name in names}
        address = running[names[0]].address
        write_token(Path(folder) / "token")
        ranks = []
        for rank, name in enumerate(hosts_of_ranks):
            environ = environment(rank, len(hosts_of_ranks), ranks_per_host, address, PORT)
            environ |= {"GLOO_SOCKET_IFNAME": "eth0", "DISTTRAIN_TOKEN_FILE": f"{folder}/token"}
            ranks.append(running[name].start(words, environ, ROOT))
        to.follow(ranks, seconds, lambda: [hosts.kill(name) for name in names])


def jobs_of(options: argparse.Namespace) -> Iterator[tuple[list[str], list[str], Weather]]:
    """Hosts of the ranks, parallelisms and weather."""
    alone = [each for each in options.parallelisms if not in_pairs(each)]
    paired = [each for each in options.parallelisms if in_pairs(each)]
    for delay_ms, mbit_s, num_ranks in itertools.product(options.delays, options.mbit, options.ranks):
        hosts = [f"host{rank}" for rank in range(num_ranks)]
        if alone:
            yield hosts, alone, Weather(delay_ms, mbit_s)
        if paired and num_ranks >= 4 and num_ranks % 2 == 0:
            yield [host for host in hosts[: num_ranks // 2] for _ in range(2)], paired, Weather(delay_ms, mbit_s)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 0.2, 1, 10], metavar="MS", help="one way")
    parser.add_argument("--mbit", type=float, nargs="+", default=[0], metavar="MBIT_S", help="0: no bound")
    add_options(parser, device="cpu")
    job.add_options(parser)
    options = parser.parse_args()
    if options.started:
        be_rank(options)
        return
    if reason := lacking():
        raise SystemExit(f"No hosts can be made: {reason}")
    listener = Listener(lambda found: keep(found, options.json), options.seconds)
    jobs = list(jobs_of(options))
    for number, each in enumerate(jobs):
        play(*each, listener, len(jobs) - number)
    print(f"\n{table([found.row for found in listener.found])}")
    if listener.problems:
        raise SystemExit(listener.problems[0])


if __name__ == "__main__":
    main()
