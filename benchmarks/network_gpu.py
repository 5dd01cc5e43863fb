"""Training over NCCL's network transport on the GPUs of one host, ours and torch's in turns.

    python benchmarks/network_gpu.py --ranks 2 4 --parallelisms fsdp --dims 512 768 2048 --layers 12 --json FILE
    disttrain-launch --standalone --oversubscribe --nproc-per-node 2 benchmarks/network_gpu.py --dims 512 --layers 24

Any number of ranks, spread over the GPUs that there are, of which NCCL takes each for a host of its own (NCCL_HOSTID)
and reaches it by sockets on `lo`. hsdp and 2d have two ranks a host, of which the inner axis is made. NCCL refuses two
ranks of one host on one GPU, so on a single GPU these are hosts of their own as well: both axes go over the network,
and lines say "(one rank a host)". Started by itself it starts the ranks; under a launcher it is one of them. Each
case is printed as it is found, and --json written anew; after --seconds no case or round is begun with. On the CPU,
over Gloo: --device cpu.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import torch
from harness import command_line, table
from networks import job
from networks.job import Listener, command, environment, joined, keep, tell_starter
from networks.sides import in_pairs
from networks.turns import Found, Weather, add_options, run

from disttrain.store import write_token

BY_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "GLOO_SOCKET_IFNAME": "lo"}


def become_host(number: int) -> None:
    """For NCCL, and for us, who know hosts by their names."""
    os.environ.update({name: os.environ.get(name, value) for name, value in BY_SOCKETS.items()})
    os.environ["NCCL_HOSTID"] = f"host{number}"
    socket.gethostname = lambda: f"host{number}"


def be_rank(options: argparse.Namespace) -> None:
    """Of a job that this script has started, or a launcher."""
    rank = int(os.environ["RANK"])
    become_host(rank // options.ranks_per_host)
    machine = f"{os.environ['WORLD_SIZE']} ranks on CPUs"
    if options.device == "cuda":
        # Neighbours, who may be of one host, get GPUs of their own as far as there are any.
        device = rank % torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(device)
        torch.cuda.set_device(device)
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, by sockets"
    found: list[Found] = []

    def tell(one: Found) -> None:
        found.append(one)
        if rank == 0:
            print(one.line(), flush=True)
            keep(found, options.json, machine)

    with joined(options):
        run(options, [Weather()], lambda _: None, tell_starter if options.started else tell)


def play(num_ranks: int, ranks_per_host: int, chosen: list[str], to: Listener) -> None:
    """A job, and what it tells."""
    port = free_ports()
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        write_token(Path(folder) / "token")
        for rank in range(num_ranks):
            told = environment(rank, num_ranks, ranks_per_host, "127.0.0.1", port)
            ranks.append(
                subprocess.Popen(
                    command(chosen, ranks_per_host, to.left_s),
                    env=told | {"DISTTRAIN_TOKEN_FILE": f"{folder}/token"},
                    stdin=subprocess.DEVNULL if rank else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        to.follow(ranks, lambda: [process.kill() for process in ranks])


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
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="where no launcher says how many")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    sizes = {"dims": [512, 768, 2048, 4096], "layers": [12, 24], "vocab": 8192, "seq": 256, "batch": 4}
    add_options(parser, dtype="bfloat16", **sizes)
    job.add_options(parser)
    options = parser.parse_args()
    if options.started or "RANK" in os.environ:
        be_rank(options)
        return
    machine = f"{options.ranks} ranks on CPUs"
    num_gpus = 0
    if options.device == "cuda":
        # Not by a context of CUDA, which would take memory of a GPU that the ranks need.
        num_gpus = torch.cuda.device_count()
        machine = f"{num_gpus} x {torch.cuda.get_device_name()}, by sockets"
    listener = Listener(lambda found: keep(found, options.json, machine), options.seconds)
    fits_pairs = num_gpus != 1
    alone = [each for each in options.parallelisms if not (in_pairs(each) and fits_pairs)]
    paired = [each for each in options.parallelisms if in_pairs(each) and fits_pairs]
    for num_ranks in options.ranks:
        for chosen, ranks_per_host in ((alone, 1), (paired, 2)):
            if chosen and listener.left_s and not (chosen is paired and (num_ranks < 4 or num_ranks % 2)):
                play(num_ranks, ranks_per_host, chosen, listener)
    if listener.found:
        print(f"\n{table([found.row for found in listener.found])}")
    if listener.problems:
        raise SystemExit(listener.problems[0])


if __name__ == "__main__":
    main()
