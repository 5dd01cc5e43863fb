"""Finds the link that a rank has along an axis of the mesh."""

from __future__ import annotations

from disttrain.plan.job import Choice, Job
from disttrain.plan.time.collective_times import Link


def link_of(job: Job, choice: Choice, axis: str) -> Link:
    """A ring that leaves a node does so once for each of its ranks there, which share the node's network evenly with
    the rings beside it. A pipeline's messages have one rank's share, and one hop."""
    hardware, mesh = job.hardware, choice.mesh
    num_ranks, on_node = mesh.size(axis), mesh.num_on_node(axis, job.node_size)
    steps = (hardware.node_step_s, hardware.network_step_s)
    if on_node == num_ranks:
        hops = 2 if axis == "pp" else num_ranks
        return Link(hardware.node_latency_s, hardware.node_bytes_per_s, hops, 1, *steps)
    rails, hops = (1, 2) if axis == "pp" else (on_node, num_ranks)
    rate = min(hardware.node_bytes_per_s, rails * hardware.network_bytes_per_s)
    return Link(hardware.network_latency_s, rate, hops, -(-hops // rails), *steps)
