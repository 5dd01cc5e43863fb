"""Runs on each rank of `disttrain-launch doctor`: examines the machine, measures, and prints on rank 0.

Without a launcher, it examines this machine alone. Exit code of rank 0: 0 when nothing prevents a job, 1 when something
does.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import torch

from disttrain.command_line import Parser
from disttrain.console import write
from disttrain.doctor.findings import ALL, Finding, Findings, State, as_json, as_text, is_bad
from disttrain.doctor.link_speeds import measure_links
from disttrain.doctor.links import Links, merged
from disttrain.doctor.machine import examine, look, versions
from disttrain.doctor.network import TIMEOUT_S, measure_pairs, measure_whole
from disttrain.doctor.pairs import MAX_ROUNDS, Measured, Pair, judge
from disttrain.errors import StoreTimeoutError
from disttrain.process_group import World, current_world, destroy_process_group, init_process_group
from disttrain.settings import LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, RANK
from disttrain.store import HashStore, PrefixStore, Store
from disttrain.store.clock import ask_clock, serve_clock

LOOK_S = 60.0
MEASURE_S = 4 * TIMEOUT_S * (MAX_ROUNDS + 1)
MAX_CLOCK_S = 1.0
"""Logs of nodes whose clocks differ by more are hard to read together."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="disttrain-launch doctor")
    parser.add_argument("--json", action="store_true", help="print an object: is_fit, and findings")
    measuring = "measure the links between nodes by the job's transport; node 0 writes FILE for disttrain.plan --links"
    parser.add_argument("--links", metavar="FILE", type=Path, help=measuring)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if RANK.read() is None:
        # Nobody has started it as one of several ranks: this machine by itself.
        init_process_group(rank=0, world_size=1, store=HashStore())
    else:
        init_process_group()
    world = current_world("doctor")
    try:
        findings, links = _examine_all(world, measures_links=args.links is not None)
        if findings is None:
            return 0
        if links is not None:
            args.links.write_text(links.to_json(), encoding="utf-8")
            print(links, end="\n\n", file=sys.stderr if args.json else sys.stdout)
        write(json.dumps(as_json(findings), indent=1) if args.json else as_text(findings))
        return int(is_bad(findings))
    finally:
        destroy_process_group()


def _examine_all(world: World, *, measures_links: bool) -> tuple[Findings | None, Links | None]:
    """The findings of all ranks, and the links where rank 0 asks for them, on rank 0."""
    store = PrefixStore("doctor", world.store)
    served = store.listener()
    if world.rank == 0:
        threading.Thread(target=serve_clock, args=[served], daemon=True).start()
    _put(store, f"seen/{world.rank}", _seen(world, store))
    seen, absent = _collected(store, "seen", world.world_size, LOOK_S) if world.rank == 0 else ({}, [])
    leaders = [rank for rank, entry in sorted(seen.items()) if entry["local_rank"] == 0]
    if world.rank == 0:
        # Without everybody, measuring would only wait for its timeout.
        _put(store, "leaders", [[] if absent else leaders, measures_links and len(leaders) > 1])
    store.wait(["leaders"], 2 * LOOK_S)
    measuring, has_links = msgpack.unpackb(store.get("leaders"))
    if measuring:
        pairs = [[list(pair), *_plain(entry)] for pair, entry in measure_pairs(world, measuring).items()]
        links = measure_links(world, nodes_of(measuring, world.world_size)) if has_links else ([], 0.0)
        _put(store, f"measured/{world.rank}", [pairs, [entry.to_plain() for entry in measure_whole(world)], links])
    if world.rank:
        # Rank 0 reads what is in the store before anybody takes that away.
        store.wait(["read"], 2 * MEASURE_S)
        return None, None
    measured, _ = _collected(store, "measured", world.world_size if measuring else 0, MEASURE_S)
    findings = _summary(seen, absent, leaders, measured)
    _put(store, "read", True)
    served.close()
    return findings, _links(world, seen, leaders, measured) if measuring and has_links else None


def nodes_of(leaders: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The ranks of each node, which follow its first one."""
    ends = [*leaders[1:], num_ranks]
    return [list(range(first, end)) for first, end in zip(leaders, ends, strict=True)]


def _links(world: World, seen: dict[int, Any], leaders: Sequence[int], measured: dict[int, Any]) -> Links | None:
    hosts = _names([seen[rank]["host"] for rank in leaders])
    num_ranks = min(map(len, nodes_of(leaders, world.world_size)))
    rows = [row for _, _, (rows, _) in measured.values() for row in rows]
    gather_s = max((seconds for _, _, (_, seconds) in measured.values()), default=0.0)
    transport = "nccl" if world.device.type == "cuda" else "gloo"
    links = merged(transport, hosts, num_ranks, rows, gather_s)
    return links if links.pairs else None


def _seen(world: World, store: Store) -> dict[str, Any]:
    """The message of one rank about its machine; only the first of a node examines it."""
    local_rank = LOCAL_RANK.read() or 0
    has_others = world.world_size > (LOCAL_WORLD_SIZE.read() or 1)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    machine = look(MASTER_ADDR.read() if has_others else None, num_gpus)
    findings = examine(machine) if local_rank == 0 else []
    if local_rank == 0 and world.rank:
        findings.append(_clock(ask_clock(store)))
    return {
        "host": machine.host,
        "local_rank": local_rank,
        "versions": versions(torch.__version__),
        "findings": [finding.to_plain() for finding in findings],
    }


def _clock(answer: tuple[float, float] | None) -> Finding:
    if answer is None:
        return Finding("clock", State.DOUBTFUL, "node 0 did not tell its time", "Look at node 0's load.")
    offset_s, error_s = answer
    value = f"{-offset_s:+.3f} s against node 0, give or take {error_s:.3f}"
    if abs(offset_s) <= MAX_CLOCK_S + error_s:
        return Finding("clock", State.GOOD, value if abs(offset_s) > 10 * error_s else "as on node 0")
    return Finding("clock", State.DOUBTFUL, value, "Let NTP set it (timedatectl, chronyc).")


def _summary(
    seen: dict[int, Any],
    absent: Sequence[int],
    leaders: Sequence[int],
    measured: dict[int, Any],
) -> Findings:
    """`measured`, by rank: rows of pairs, and of findings on all ranks together."""
    hosts = _names([seen[rank]["host"] for rank in leaders])
    by_host: dict[str, list[Finding]] = {
        host: [Finding.from_plain(row) for row in seen[rank]["findings"]]
        for host, rank in zip(hosts, leaders, strict=True)
    }
    common: list[Finding] = []
    if absent:
        problem = f"ranks {list(absent)} did not come within {LOOK_S:g} s"
        common.append(Finding("ranks", State.BAD, problem, "See their output; a node may be slow to load torch."))
    kinds = sorted({entry["versions"] for entry in seen.values()})
    alike = Finding("versions", State.GOOD, kinds[0])
    differing = Finding("versions", State.BAD, "; ".join(kinds), "Install the same on all nodes.")
    common.append(alike if len(kinds) == 1 else differing)
    pairs = {pair: entry for rows, _, _ in measured.values() for pair, entry in _pairs(rows).items()}
    whole: dict[str, Finding] = {}
    for _, rows, _ in measured.values():
        for entry in map(Finding.from_plain, rows):
            # A sum may be wrong on one rank only.
            if entry.topic not in whole or (entry.state is State.BAD and whole[entry.topic].state is not State.BAD):
                whole[entry.topic] = entry
    for host, findings in judge(hosts, pairs).items():
        (common if host == ALL else by_host[host]).extend(findings)
    if len(hosts) > 1:
        return {**by_host, ALL: [*common, *whole.values()]}
    return {hosts[0]: [*common, *by_host[hosts[0]], *whole.values()]}


def _names(hosts: Sequence[str]) -> list[str]:
    """Names of nodes, apart where several have one host name."""
    return [f"{host} (node {node})" if hosts.count(host) > 1 else host for node, host in enumerate(hosts)]


def _put(store: Store, key: str, value: Any) -> None:
    store.set(key, msgpack.packb(value))


def _collected(store: Store, name: str, num_ranks: int, timeout_s: float) -> tuple[dict[int, Any], list[int]]:
    """The values that ranks have put, and the ranks that have not."""
    keys = {rank: f"{name}/{rank}" for rank in range(num_ranks)}
    try:
        store.wait(list(keys.values()), timeout_s)
    except StoreTimeoutError:
        pass
    present = {rank: key for rank, key in keys.items() if store.check([key])}
    return {rank: msgpack.unpackb(store.get(key)) for rank, key in present.items()}, sorted(
        keys.keys() - present.keys()
    )


def _plain(measured: Measured) -> list[Any]:
    return [measured.bytes_per_s, measured.latency_s, measured.problem]


def _pairs(rows: list[list[Any]]) -> dict[Pair, Measured]:
    return {(pair[0], pair[1]): Measured(*rest) for pair, *rest in rows}


if __name__ == "__main__":
    sys.exit(main())
