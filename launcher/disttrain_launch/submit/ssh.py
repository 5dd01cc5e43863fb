"""Makes the commands that ssh runs on each host, and their standard input.

Nothing has to survive a remote shell's quoting, and neither variables nor token show in `ps`. An order is one line of
JSON: the launcher's arguments, variables, working directory and the job's token. Whatever follows are signals to pass
on, a number a line (`far_end`).
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from disttrain.errors import LaunchError
from disttrain_launch.clusters.membership import port_of
from disttrain_launch.submit.request import Submission


@dataclass(frozen=True)
class Order:
    """One host's part."""

    host: str
    node_rank: int
    command: tuple[str, ...]
    """ssh and its arguments, on this machine."""
    told: bytes
    """The order's line."""


def host_names(operation: str, args: argparse.Namespace) -> tuple[str, ...]:
    """The hosts of `--hosts` or `--host-file`, in the order of node ranks. Raises LaunchError."""
    if (args.hosts is None) == (args.host_file is None):
        raise LaunchError(operation, "hosts are named by --hosts or by --host-file.", "Give one of them.")
    if args.hosts is not None:
        hosts = tuple(args.hosts.split(","))
    else:
        try:
            lines = Path(args.host_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(operation, f"--host-file {args.host_file} cannot be read: {error}.") from None
        hosts = tuple(filter(None, (line.partition("#")[0].strip() for line in lines)))
    for host in hosts:
        # A host that begins with a hyphen would be one of ssh's own flags.
        if not re.fullmatch(r"[^\s,-][^\s,]*", host):
            raise LaunchError(operation, f"{host!r} is not a host.", "Name hosts as ssh knows them, without slots.")
    if not hosts or len(set(hosts)) < len(hosts):
        raise LaunchError(operation, f"{', '.join(hosts) or 'no host'}: each node needs a host.", "Name each once.")
    return hosts


def orders(
    job: Submission,
    args: argparse.Namespace,
    hosts: Sequence[str],
    *,
    token: str,
    directory: Path,
    variables: Mapping[str, str],
    python_path: str | None,
) -> list[Order]:
    """Each host's order. Args: token  of the job;  directory  to work in;  python_path  where hosts find disttrain."""
    run_id = args.rdzv_id or f"ssh-{secrets.token_hex(4)}"
    variables_first = ("env", f"PYTHONPATH={python_path}") if python_path else ()
    far_end = shlex.join((*variables_first, job.python, "-m", "disttrain_launch.submit.far_end"))
    made = []
    for node_rank, host in enumerate(hosts):
        flags = ["--token-file=-"]
        if len(hosts) > 1:
            flags += [f"--nnodes={job.nnodes}", f"--node-rank={node_rank}", f"--rdzv-id={run_id}"]
            flags += _where(args, hosts[0], run_id)
        order = {
            "arguments": job.run_arguments(*flags),
            "variables": dict(variables),
            "directory": str(directory),
            "token": token,
        }
        command = (*shlex.split(args.ssh), host, far_end)
        made.append(Order(host, node_rank, command, json.dumps(order).encode() + b"\n"))
    return made


def _where(args: argparse.Namespace, first_host: str, run_id: str) -> list[str]:
    if "rdzv_endpoint" in args.given:
        return []
    addr = [] if "master_addr" in args.given else [f"--master-addr={first_host.rpartition('@')[2]}"]
    return addr + ([] if "master_port" in args.given else [f"--master-port={port_of(run_id)}"])
