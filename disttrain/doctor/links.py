"""Measurements between nodes, by the transport that a job uses: a file for the planner. Torch-free."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from disttrain.console import table
from disttrain.errors import SettingError

_MAX_ROWS = 28
"""Of a printed table: the pairs of eight nodes. Of more, the slowest are shown."""


@dataclass(frozen=True)
class LinkOfPair:
    """The link between two nodes, by their indices in the list of hosts.

    Args: latency_s  of a small message, one way, while nothing else is sent;  bytes_per_s  that each rank of a node
          sends while it receives as much, and all the others of both nodes do so too.
    """

    first: int
    second: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Links:
    """The links between all nodes that could talk.

    Args: transport  "gloo" or "nccl";  num_ranks  that measured on each node;  gather_s  of a small gather over one
          rank of each node, 0 where there are two.
    """

    transport: str
    hosts: tuple[str, ...]
    num_ranks: int
    pairs: tuple[LinkOfPair, ...]
    gather_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate of a ring, which is as fast as its slowest link."""
        return min(pair.bytes_per_s for pair in self._in_ring)

    @property
    def latency_s(self) -> float:
        """The latency of one hop: a ring goes over all of its links."""
        return statistics.fmean(pair.latency_s for pair in self._in_ring)

    @property
    def step_s(self) -> float:
        """The time that each further hop adds to a gather."""
        num_further = len(self.hosts) - 2
        if num_further < 1 or not self.gather_s:
            return self.latency_s
        return max(0.0, self.gather_s - self.latency_s) / num_further

    @property
    def _in_ring(self) -> Sequence[LinkOfPair]:
        """The links between neighbours, as ranks are in a ring; all where one of these is not known."""
        num_hosts = len(self.hosts)
        neighbours = {frozenset((node, (node + 1) % num_hosts)) for node in range(num_hosts)}
        neighbour_pairs = [pair for pair in self.pairs if frozenset((pair.first, pair.second)) in neighbours]
        return neighbour_pairs if len(neighbour_pairs) == len(neighbours) else self.pairs

    def __str__(self) -> str:
        """A table, the slowest pairs first."""
        slowest = sorted(self.pairs, key=lambda pair: pair.bytes_per_s)
        rows = [
            (
                f"{self.hosts[pair.first]} - {self.hosts[pair.second]}",
                f"{1e6 * pair.latency_s:.0f}",
                f"{pair.bytes_per_s / 1e9:.3g}",
                f"{self.num_ranks * pair.bytes_per_s / 1e9:.3g}",
            )
            for pair in slowest[:_MAX_ROWS]
        ]
        left_out = len(self.pairs) - len(rows)
        text = table((f"by {self.transport}", "us", "GB/s a rank", "GB/s a node"), rows, words=(0,))
        return text + (f"\n{left_out} faster pairs are left out" if left_out else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def merged(
    transport: str, hosts: Sequence[str], num_ranks: int, rows: Iterable[Sequence[float]], gather_s: float
) -> Links:
    """`rows` are what ranks have measured: first, second, latency (0 but of one rank), bytes per second."""
    latencies: dict[tuple[int, int], float] = {}
    rates: dict[tuple[int, int], float] = {}
    for first, second, latency_s, bytes_per_s in rows:
        pair = int(first), int(second)
        latencies[pair] = max(latency_s, latencies.get(pair, 0.0))
        rates[pair] = min(bytes_per_s, rates.get(pair, bytes_per_s))
    pairs = [LinkOfPair(*pair, latencies[pair], rates[pair]) for pair in sorted(rates) if latencies[pair]]
    return Links(transport, tuple(hosts), num_ranks, tuple(pairs), gather_s)


def read_links(path: Path) -> Links:
    """Reads what `to_json` has written. Raises: SettingError when the file is not that, or holds no pair."""
    remedy = "Write one: disttrain-launch doctor --nnodes ... --links FILE"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        pairs = tuple(LinkOfPair(**pair) for pair in content.pop("pairs"))
        links = Links(**{**content, "hosts": tuple(content["hosts"]), "pairs": pairs})
        is_sound = all(pair.latency_s >= 0 and pair.bytes_per_s > 0 for pair in pairs)
    except OSError as error:
        raise SettingError("plan --links", f"{path}: {error.strerror}.", remedy) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SettingError("plan --links", f"{path} does not hold links: {error!r}.", remedy) from None
    if not pairs or not is_sound:
        raise SettingError("plan --links", f"{path} holds no pair of nodes that was measured.", remedy)
    return links
