"""The request that every cluster gets, checked before anything is written or sent."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain.errors import LaunchError
from disttrain_launch.request.flags import make_parser

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Submission:
    """A job for a cluster, in the cluster's words."""

    operation: str
    """`disttrain-launch submit slurm`; how messages begin."""
    name: str
    least_nodes: int
    most_nodes: int
    launcher_flags: tuple[str, ...]
    """Of each node's launcher, without those that the cluster fills in."""
    script: tuple[str, ...]
    """Script and its arguments."""
    python: str
    has_token: bool
    """The user gave a token file of their own."""

    @property
    def is_elastic(self) -> bool:
        return self.least_nodes != self.most_nodes

    @property
    def nnodes(self) -> str:
        return f"{self.least_nodes}:{self.most_nodes}" if self.is_elastic else str(self.most_nodes)

    @property
    def launcher(self) -> tuple[str, ...]:
        return (self.python, "-m", "disttrain_launch")

    def run_command(self, *flags: str) -> tuple[str, ...]:
        """The launcher's whole argument vector, with `flags` before those that the user gave."""
        return (*self.launcher, *self.run_arguments(*flags))

    def run_arguments(self, *flags: str) -> tuple[str, ...]:
        return ("run", *flags, *self.launcher_flags, *self.script)


def submission(operation: str, args: argparse.Namespace, num_nodes: int | None = None) -> Submission:
    """Check what all clusters have in common. `num_nodes`: where hosts are named, their number. Raises LaunchError."""
    if args.script is None:
        raise LaunchError(operation, "no script was given.", f"See {operation} --help.")
    unwanted = {"standalone", "node_rank", "new_token"} & args.given
    if unwanted:
        flags = ", ".join(sorted(map(_flag, unwanted)))
        raise LaunchError(operation, f"{flags} cannot be submitted.", "The cluster says which node is which.")
    least, most = _nodes(operation, args, num_nodes)
    if not re.fullmatch(r"[1-9][0-9]*|gpu|cpu|auto", args.nproc_per_node):
        problem = f"--nproc-per-node {args.nproc_per_node} starts nothing."
        raise LaunchError(operation, problem, "Give a positive number, or gpu, cpu or auto.")
    name = args.job_name or re.sub(r"[^\w.-]", "-", Path(args.script).stem) or "job"
    one_line(operation, "--job-name", name)
    return Submission(
        operation=operation,
        name=name,
        least_nodes=least,
        most_nodes=most,
        launcher_flags=tuple(_launcher_flags(args, without={"nnodes"})),
        script=(args.script, *args.script_args),
        python=args.python,
        has_token="token_file" in args.given,
    )


def one_line(operation: str, flag: str, value: str) -> str:
    """`value`, of which a line of a script is made. Raises LaunchError when it would be more than one."""
    if _CONTROL.search(value):
        raise LaunchError(operation, f"{flag} {value!r} holds a line break or another control character.", "Drop it.")
    return value


def chosen_variables(operation: str, choices: Collection[str], environ: Mapping[str, str]) -> dict[str, str]:
    """`--env NAME=VALUE`, or `NAME` alone for the value that it has here. Raises LaunchError."""
    chosen = {}
    for choice in choices:
        name, equals, value = choice.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise LaunchError(operation, f"--env {choice}: {name!r} cannot be a variable's name.", "Give NAME=VALUE.")
        if not equals and name not in environ:
            raise LaunchError(operation, f"--env {name}: it is not set here.", f"Set it, or give {name}=VALUE.")
        chosen[name] = value if equals else environ[name]
    return chosen


def _nodes(operation: str, args: argparse.Namespace, num_nodes: int | None) -> tuple[int, int]:
    text = args.nnodes if num_nodes is None or "nnodes" in args.given else str(num_nodes)
    match = re.fullmatch(r"([1-9][0-9]*)(?::([1-9][0-9]*))?", text)
    least, most = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 0 < least <= most:
        raise LaunchError(operation, f"--nnodes {text} is not a number of nodes.", "Give 4, or 2:4 for a range.")
    if num_nodes is not None and not least <= num_nodes <= most:
        raise LaunchError(operation, f"--nnodes {text}: {num_nodes} hosts are named.", "Drop --nnodes.")
    return least, most


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _launcher_flags(args: argparse.Namespace, without: Collection[str]) -> list[str]:
    """The launcher's own flags among those given, as arguments again."""
    defaults: dict[str, Any] = vars(make_parser().parse_args([]))
    flags = []
    for name, value in vars(args).items():
        if name in defaults and name in args.given and name not in {"script", "script_args", *without}:
            flags += [_flag(name)] * value if isinstance(value, bool) else [f"{_flag(name)}={value}"]
    return flags
