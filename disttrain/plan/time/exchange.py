"""Counts the rows that go to experts and back, over which links, and estimates how long that takes.

Each token's row goes to the ranks along ep that have its experts, and comes back from each: two all-to-alls in a
block's forward, two in its backward. Choices are taken to be spread evenly over ranks, but for the assumed imbalance:
the rank with most rows sets the time. A rank talks with others of its host and with other hosts at once, so that the
slower of both sets the time, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from disttrain.plan.job import Choice, Job
from disttrain.plan.model.activations import load_of


@dataclass(frozen=True)
class Exchange:
    """One way of one microbatch's rows, or keys and values, in one block: bytes that a rank sends on its host, and to
    others."""

    within_bytes: float
    between_bytes: float
    latency_s: float
    seconds: float

    @property
    def sent_bytes(self) -> float:
        return self.within_bytes + self.between_bytes


@cache
def exchange_of(job: Job, choice: Choice, element_bytes: int) -> Exchange | None:
    """None where there is nobody to exchange with."""
    experts, ep = job.sizes.experts, choice.mesh.ep
    if experts is None or ep == 1:
        return None
    hardware, on_host = job.hardware, choice.mesh.num_on_node("ep", job.node_size)
    row_bytes = choice.tokens(job) * job.sizes.dim * element_bytes
    num_hosts = ep / on_host
    if job.assumed.once_per_host:
        # From the rank at which a row arrives on a host it goes to those that have the token's experts.
        within = row_bytes * experts.top_k * (on_host - 1) / on_host
        between = row_bytes * experts.hosts_of_token(round(num_hosts)) * (num_hosts - 1) / num_hosts
    else:
        within = row_bytes * experts.top_k * (on_host - 1) / ep
        between = row_bytes * experts.top_k * (ep - on_host) / ep
    # Of an all-to-all each further rank adds a message.
    latency_s = hardware.node_latency_s if on_host == ep else hardware.network_latency_s
    latency_s += (ep - 2) * hardware.node_step_s
    slower = max(within / hardware.node_bytes_per_s, between / hardware.network_bytes_per_s)
    return Exchange(within, between, latency_s, latency_s + load_of(job, ep) * slower)


def both_ways(job: Job, choice: Choice) -> tuple[Exchange, Exchange] | None:
    """To the experts and back."""
    compute = job.precision.compute_bytes
    there = exchange_of(job, choice, job.assumed.exchange_bytes or compute)
    back = exchange_of(job, choice, compute)
    return None if there is None or back is None else (there, back)


def exchange_s(job: Job, choice: Choice) -> float:
    """Of a block's forward, and of its backward likewise."""
    ways = both_ways(job, choice)
    return 0.0 if ways is None else sum(way.seconds for way in ways)
