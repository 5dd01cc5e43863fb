"""Training over NCCL's network transport on the GPUs of one host, ours and torch's in turns.

    python benchmarks/network_gpu.py --ranks 2 4 --parallelisms fsdp tp --shapes 512x12 2048x12 --out FILE
    disttrain-launch --standalone --oversubscribe --nproc-per-node 2 benchmarks/network_gpu.py --shapes 512x24

Any number of ranks, spread over the GPUs that there are, of which NCCL takes each for a host of its own (NCCL_HOSTID)
and reaches it by sockets on `lo`. hsdp and 2d have two ranks a host, of which the inner axis is made. NCCL refuses two
ranks of one host on one GPU, so on a single GPU these are hosts of their own as well: both axes go over the network,
and lines say "(one rank a host)". `--forms flat in_place mixed` measures these of ours beside its own choice. Started
by itself it starts the ranks; under a launcher it is one of them. Each case, the small ones first, is printed as it is
found, and FILE written anew; --case-seconds bounds each, --seconds all. Where memory does not hold all sides they come
one after the other, and where it does not hold AdamW's averages SGD steps; lines say so. Blocks are not compiled but
with --compile. On the CPU, over Gloo: --device cpu.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import table
from networks import job
from networks.job import Listener, command, environment, joined, keep, tell_starter
from networks.sides import in_pairs
from networks.turns import Found, Weather, add_options, run, shape

from disttrain.store import write_token

BY_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "GLOO_SOCKET_IFNAME": "lo"}


def become_host(number: int) -> None:
    """For NCCL, and for us, who go by what it takes for a host."""
    os.environ.update({name: os.environ.get(name, value) for name, value in BY_SOCKETS.items()})
    os.environ["NCCL_HOSTID"] = f"host{number}"


def be_rank(options: argparse.Namespace) -> None:
    """Of a job that this script has started, or a launcher."""
    rank = int(os.environ["RANK"])
    become_host(rank // options.ranks_per_host)
    if options.device == "cuda":
        # Neighbours, who may be of one host, get GPUs of their own as far as there are any.
        device = rank % torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(device)
        torch.cuda.set_device(device)
    found: list[Found] = []

    def tell(one: Found) -> None:
        found.append(one)
        if rank == 0:
            print(one.line(), flush=True)
            keep(found, options.out, machine_of(options))

    with joined(options):
        run(options, Weather(), tell_starter if options.started else tell)
    if found and rank == 0:
        print(f"\n{table([one.row for one in found])}")


def machine_of(options: argparse.Namespace) -> str:
    if options.device == "cpu":
        return ""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, by sockets"


def play(num_ranks: int, ranks_per_host: int, chosen: list[str], to: Listener, num_jobs: int) -> None:
    """A job, the first of so many that are to come, and what it tells."""
    port = free_ports()
    seconds = to.share_s(num_jobs)
    words = command(ranks_per_host, seconds, "--parallelisms", *chosen)
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        write_token(Path(folder) / "token")
        for rank in range(num_ranks):
            environ = environment(rank, num_ranks, ranks_per_host, "127.0.0.1", port)
            ranks.append(
                subprocess.Popen(
                    words,
                    env=environ | {"DISTTRAIN_TOKEN_FILE": f"{folder}/token"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        to.follow(ranks, seconds, lambda: [process.kill() for process in ranks])


def jobs_of(options: argparse.Namespace) -> Iterator[tuple[int, int, list[str]]]:
    """Ranks, ranks of a host, and parallelisms."""
    # NCCL refuses two ranks of one host on one GPU.
    makes_pairs = options.device == "cpu" or torch.cuda.device_count() > 1
    alone = [each for each in options.parallelisms if not (in_pairs(each) and makes_pairs)]
    paired = [each for each in options.parallelisms if in_pairs(each) and makes_pairs]
    for num_ranks in options.ranks:
        if alone:
            yield num_ranks, 1, alone
        if paired and num_ranks >= 4 and num_ranks % 2 == 0:
            yield num_ranks, 2, paired


def free_ports() -> int:
    """The first of two that are free, one after the other."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results to this file too")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="where no launcher says how many")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    shapes = ["512x12", "512x32", "768x12", "768x32", "2048x12", "2048x32", "4096x12", "4096x32"]
    sizes = {"shapes": [*map(shape, shapes)], "vocab": 8192, "seq": 256, "batch": 4}
    add_options(parser, dtype="bfloat16", rounds=5, case_seconds=30.0, seconds=480.0, **sizes)
    job.add_options(parser)
    options = parser.parse_args()
    if options.started or "RANK" in os.environ:
        be_rank(options)
        return
    listener = Listener(lambda found: keep(found, options.out, machine_of(options)), options.seconds)
    jobs = list(jobs_of(options))
    for number, each in enumerate(jobs):
        play(*each, listener, len(jobs) - number)
    if listener.found:
        print(f"\n{table([found.row for found in listener.found])}")
    if listener.problems:
        raise SystemExit(listener.problems[0])


if __name__ == "__main__":
    main()
