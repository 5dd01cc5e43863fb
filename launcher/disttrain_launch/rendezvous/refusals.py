"""Why a node takes no part in a job, in words with a remedy."""

from __future__ import annotations

from disttrain_launch.rendezvous.messages import Refused
from disttrain_launch.rendezvous.rounds import Node, Terms, name_nodes
from disttrain_launch.workers.outcome import Lost

# Fields in which nodes must agree, what sets each, and the remedy.
_AGREED = (
    ("num_nodes", "--nnodes", "Start all nodes alike."),
    ("version", "disttrain version", "Install the same everywhere."),
    ("run_id", "--rdzv-id", "Start all nodes alike."),
)


def misfit(node: Node, leader: Node, terms: Terms) -> Refused | None:
    """A contradiction between a node and the job, whoever else is there; None when all fits."""
    for name, shown, remedy in _AGREED:
        value, agreed = getattr(node, name), getattr(leader, name)
        if value != agreed:
            return Refused(f"{node} has {shown} {value}, {leader} has {agreed}; all nodes need the same.", remedy)
    if node.keep_alive != leader.keep_alive:
        problem = f"{node} has a keep_alive_interval and keep_alive_max_attempt of {node.keep_alive}, {leader} of "
        return Refused(f"{problem}{leader.keep_alive}; all nodes need the same.", "Give all the same --rdzv-conf.")
    if node.digest != leader.digest:
        problem = f"{node} runs another script or other arguments than {leader}."
        return Refused(problem, "Start all nodes alike; where they shall differ, all with --allow-different-commands.")
    most = terms.max_nodes - 1
    if node.node_rank is None or 0 <= node.node_rank <= most or (terms.is_elastic and node.node_rank > most):
        return None
    return Refused(f"{node} is outside --nnodes {leader.num_nodes}.", "Number nodes from 0.")


def taken_twice(node: Node, holder: Node) -> Refused:
    """Two nodes were given one rank."""
    problem = f"--node-rank {node.node_rank} was given twice: {holder.host} and {node.host}."
    return Refused(problem, "Give each node a rank of its own.")


def too_late(node: Node) -> Refused:
    """The job runs, and has no place for this node."""
    which = "" if node.node_rank is None else f": --node-rank {node.node_rank} was not free"
    return Refused(
        f"the job began without this node{which}.",
        "Is it running twice? Each node needs a rank of its own, and jobs that share a host a port of their own.",
    )


def uneven(node: Node, leader: Node) -> str:
    """They may have different numbers of workers, as with torchrun; where that was not meant, it should be seen."""
    numbers = f"{node} has --nproc-per-node {node.num_local_workers}, {leader} has {leader.num_local_workers}"
    return f"{numbers}; the job counts each node's own."


def given_up(terms: Terms) -> Lost:
    """The answer to a node that was given up and lives, behind a network that failed."""
    silent = f"gave no sign of life for {terms.keep_alive_s:g} s"
    return Lost(f"this node {silent}, and the job went on without it.")


def too_few(node_ranks: set[int], num_here: int, terms: Terms) -> Refused:
    """Nodes did not come in time; those with numbers that did have `node_ranks`."""
    waited = f"within {terms.join_timeout_s:g} s"
    absent = tuple(node_rank for node_rank in range(terms.min_nodes) if node_rank not in node_ranks)
    problem = f"{name_nodes(absent)} did not come {waited}; {name_nodes(tuple(sorted(node_ranks)))} did."
    if terms.is_elastic or len(absent) + num_here != terms.min_nodes:
        problem = f"{num_here} of at least {terms.min_nodes} nodes came {waited}."
    remedy = "Start disttrain-launch there too, with the same --nnodes, --master-addr and --master-port, or wait longer"
    return Refused(problem, f"{remedy} (--join-timeout).")
