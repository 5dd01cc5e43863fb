"""This node's place among the nodes of a cluster's job."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from disttrain.errors import LaunchError
from disttrain_launch.request.job import OPERATION

FIRST_PORT, NUM_PORTS = 20000, 10000
"""Below 32768, from where on Linux hands out ports to outgoing connections."""


@dataclass(frozen=True)
class Membership:
    """A node's part in a job, as its cluster says. None stands for what it doesn't say."""

    cluster: str
    """As messages call it: `Slurm step 17.0`."""
    node_rank: int
    num_nodes: int | None
    master_addr: str | None
    master_port: int | None = None
    run_id: str | None = None


def port_of(run_id: str) -> int:
    """A port that all nodes of a job derive alike, and jobs that share hosts hardly ever share."""
    return FIRST_PORT + zlib.crc32(run_id.encode()) % NUM_PORTS


def number(environ: Mapping[str, str], name: str) -> int:
    """A variable that the cluster sets to a count or an index. Raises LaunchError when it is anything else."""
    text = environ.get(name, "")
    if not re.fullmatch(r"[0-9]+", text):
        raise LaunchError(
            OPERATION,
            f"{name}={text!r} is not a number, although this looks like a cluster's job.",
            "Unset it, or give --nnodes, --node-rank and --master-addr.",
        )
    return int(text)
