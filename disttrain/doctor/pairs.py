"""Pairs nodes for measuring at the same time, and judges what they measured. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disttrain.doctor.findings import ALL, Finding, State

MAX_ROUNDS = 15
SLOW = 0.5
"""Below this part of what is usual between nodes, one is slow."""

Pair = tuple[int, int]


def rounds(num_nodes: int, max_rounds: int = MAX_ROUNDS) -> list[list[Pair]]:
    """Rounds in which each node is in one pair at most, so that no two pairs share a node's link.

    Every pair comes once, unless that would be more than `max_rounds`. Source: the circle method of round-robin
    tournaments.
    """
    players: list[int | None] = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    result = []
    for _ in range(min(len(players) - 1, max_rounds)):
        half = len(players) // 2
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return result


@dataclass(frozen=True)
class Measured:
    """Measurements between two nodes; `problem` says why there is nothing else."""

    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    problem: str = ""


def judge(hosts: Sequence[str], measured: Mapping[Pair, Measured]) -> dict[str, list[Finding]]:
    """Findings on the network, by host, and on the whole."""
    findings: dict[str, list[Finding]] = {}
    well = {pair: measurement for pair, measurement in measured.items() if not measurement.problem}
    if well:
        speeds = sorted(measurement.bytes_per_s for measurement in well.values())
        latency_s = statistics.median(measurement.latency_s for measurement in well.values())
        value = f"{statistics.median(speeds) / 1e9:.3g} GB/s, {latency_s * 1e6:.0f} us between two nodes"
        if len(speeds) > 1:
            value += f" (slowest pair {speeds[0] / 1e9:.3g} GB/s)"
        findings[ALL] = [Finding("network", State.GOOD, value)]
    for node, usual in _slow(len(hosts), well):
        rate = statistics.median(measurement.bytes_per_s for pair, measurement in well.items() if node in pair)
        findings.setdefault(hosts[node], []).append(
            Finding(
                "network",
                State.DOUBTFUL,
                f"{rate / 1e9:.3g} GB/s, {rate / usual:.0%} of what the other nodes have",
                "All wait for the slowest: look at its link, its cable and its switch port, or leave the node out.",
            )
        )
    for node, problems in _unreachable(len(hosts), measured).items():
        with_whom = ", ".join(hosts[other] for other in problems)
        findings.setdefault(hosts[node], []).append(
            Finding(
                "network",
                State.BAD,
                f"no connection with {with_whom}: {next(iter(problems.values()))}",
                "Open all ports between the nodes of the job, or name the interface that they share: "
                "GLOO_SOCKET_IFNAME.",
            )
        )
    return findings


def _slow(num_nodes: int, well: Mapping[Pair, Measured]) -> list[tuple[int, float]]:
    """Nodes whose links are slow, with the speed of the others."""
    of_node = {
        node: [measurement.bytes_per_s for pair, measurement in well.items() if node in pair]
        for node in range(num_nodes)
        if any(node in pair for pair in well)
    }
    slow = []
    for node, speeds in of_node.items():
        others = [measurement.bytes_per_s for pair, measurement in well.items() if node not in pair]
        if others and statistics.median(speeds) < SLOW * statistics.median(others):
            slow.append((node, statistics.median(others)))
    return slow


def _unreachable(num_nodes: int, measured: Mapping[Pair, Measured]) -> dict[int, dict[int, str]]:
    """The node to blame for each failed pair: the one that has failed with more of the others."""
    failed = {pair: measurement.problem for pair, measurement in measured.items() if measurement.problem}
    count = {node: sum(node in pair for pair in failed) for node in range(num_nodes)}
    unreachable: dict[int, dict[int, str]] = {}
    for (first, second), problem in failed.items():
        blamed, other = (second, first) if count[second] >= count[first] else (first, second)
        unreachable.setdefault(blamed, {})[other] = problem
    return unreachable
