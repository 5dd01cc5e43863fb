"""Estimates the time of a collective: a part that its bytes decide, and one that the number of ranks does.

In a ring of n ranks a piece takes n - 1 hops for a gather, or for a reduction that leaves each rank its part, and
2(n - 1) for an all-reduce. In a tree it takes 2 log2(nodes) between nodes, and for large tensors a little more is sent.
Source: the model by which NCCL chooses an algorithm (src/graph/tuning.cc), where hops between nodes and within them
count by themselves, and a tree attains nine tenths of a ring's rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

TREE_RATE: Final = 0.9
"""Of a ring's."""


@dataclass(frozen=True)
class Link:
    """Bandwidth and latency that one rank of an axis has for itself, and the hops to the others.

    Args: latency_s  of a message, or of a collective of two ranks, however small;  bytes_per_s  that it sends;
          num_ranks, num_nodes  of the axis;  node_step_s, network_step_s  for each hop beyond the first, within a node
          and between two.
    """

    latency_s: float
    bytes_per_s: float
    num_ranks: int = 2
    num_nodes: int = 1
    node_step_s: float = 0.0
    network_step_s: float = 0.0

    @property
    def gather_latency_s(self) -> float:
        """Of a gather, or of a reduction that leaves each rank its part."""
        return self._hops_s(self.num_ranks - self.num_nodes, self.num_nodes - 1)

    @property
    def all_reduce_latencies_s(self) -> dict[str, float]:
        """By algorithm."""
        per_node = self.num_ranks // self.num_nodes
        ring = self._hops_s(2 * (self.num_ranks - self.num_nodes), 2 * (self.num_nodes - 1))
        return {"ring": ring, "tree": self._hops_s(2 * (per_node - 1), 2 * math.ceil(math.log2(self.num_nodes)))}

    def seconds(self, num_bytes: float, num_calls: float = 1) -> float:
        """Of messages, gathers or reductions that leave each rank its part, in which a rank sends so much in all."""
        return num_calls * self.gather_latency_s + num_bytes / self.bytes_per_s

    def all_reduce_s(self, num_bytes: float) -> float:
        """Of a tensor of so many bytes, by the faster algorithm."""
        latencies = self.all_reduce_latencies_s
        ring = latencies["ring"] + 2 * num_bytes * (self.num_ranks - 1) / self.num_ranks / self.bytes_per_s
        tree = latencies["tree"] + 2 * num_bytes / (TREE_RATE * self.bytes_per_s)
        return min(ring, tree)

    def _hops_s(self, within: float, between: float) -> float:
        """The first hop, which is one between nodes where there is any, costs `latency_s`."""
        if between:
            return self.latency_s + within * self.node_step_s + (between - 1) * self.network_step_s
        return self.latency_s + max(0, within - 1) * self.node_step_s
