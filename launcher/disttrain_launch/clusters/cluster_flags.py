"""Fills in flags of a job from its cluster."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping

from disttrain import settings
from disttrain.errors import LaunchError
from disttrain_launch.clusters import find
from disttrain_launch.clusters.membership import Membership
from disttrain_launch.request.job import OPERATION


def placed(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[argparse.Namespace, str]:
    """The flags with what the cluster knows, and what to say of it; empty when there is nothing to say.

    Args: args  as `flags.parse` returns them; `args.given` names those that somebody chose. What was given stays.
    Raises: LaunchError where the cluster doesn't start one launcher per node, says something else than what was
            given, or doesn't say where node 0 is.
    """
    # A worker of ours has its place already; what it starts is a job of its own.
    if settings.AGENT.is_set(environ) or _says_all(args):
        return args, ""
    membership = find(environ)
    if membership is None:
        return args, ""
    if membership.num_nodes is None and "nnodes" not in args.given:
        return args, ""
    _check(args, membership)
    if membership.num_nodes == 1 and ":" not in args.nnodes:
        return args, ""
    filled = {
        name: value
        for name, value in _flags_of(membership, args.given).items()
        if name not in args.given and value is not None
    }
    if not args.given & {"master_addr", "rdzv_endpoint"} and "master_addr" not in filled:
        raise LaunchError(
            OPERATION,
            f"{membership.cluster} does not say where node 0 is.",
            "Give --master-addr HOST, the same on all nodes.",
        )
    settled = argparse.Namespace(**{**vars(args), **filled})
    return settled, _words(membership, settled)


def _says_all(args: argparse.Namespace) -> bool:
    where = args.given & {"master_addr", "rdzv_endpoint"}
    is_one_node = "nnodes" in args.given and set(args.nnodes.split(":")) == {"1"}
    return bool(args.standalone or is_one_node or (where and {"nnodes", "node_rank"} <= args.given))


def _check(args: argparse.Namespace, membership: Membership) -> None:
    conflicts = []
    if "nnodes" in args.given and membership.num_nodes is not None and not _fits(args.nnodes, membership.num_nodes):
        conflicts.append(f"--nnodes {args.nnodes}: {membership.cluster} has {membership.num_nodes} nodes.")
    if "node_rank" in args.given and args.node_rank != membership.node_rank:
        conflicts.append(f"--node-rank {args.node_rank}: in {membership.cluster} this is node {membership.node_rank}.")
    if conflicts:
        remedy = "Drop the flag; or give --nnodes, --node-rank and --master-addr, all three, for a job of another form."
        raise LaunchError(OPERATION, " ".join(conflicts), remedy)


def _fits(nnodes: str, num_nodes: int) -> bool:
    if not re.fullmatch(r"[0-9]+(:[0-9]+)?", nnodes):
        return True  # What this is instead of a number is refused where all flags are checked.
    least, _, most = nnodes.partition(":")
    return int(least) <= num_nodes <= int(most or least)


def _flags_of(membership: Membership, flags: Collection[str]) -> dict[str, str | int | None]:
    where = {"master_addr": membership.master_addr, "master_port": membership.master_port}
    return {
        "nnodes": None if membership.num_nodes is None else str(membership.num_nodes),
        "node_rank": membership.node_rank,
        "rdzv_id": membership.run_id,
        **({} if "rdzv_endpoint" in flags else where),
    }


def _words(membership: Membership, args: argparse.Namespace) -> str:
    """For node 0 alone: a thousand nodes need not say it a thousand times."""
    if membership.node_rank != 0:
        return ""
    where = args.rdzv_endpoint or (f"{args.master_addr}:{args.master_port}" if args.master_port else args.master_addr)
    return f"{membership.cluster}: {args.nnodes} nodes, which meet at {where}"
