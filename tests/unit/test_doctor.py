"""The doctor's judgement: what machines and networks are like, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.doctor.findings import ALL, Finding, Findings, State, as_json, as_text, is_bad
from disttrain.doctor.machine import GIB, UNLIMITED, Machine, examine, look
from disttrain.doctor.pairs import Measured, judge, rounds

FIT = Machine(
    host="node7",
    addresses=("10.0.0.7",),
    own_address="10.0.0.7",
    interface="eth0",
    has_others=True,
    num_cores=64,
    cpu_quota=None,
    load=3.0,
    available_bytes=900 * GIB,
    shared_bytes=500 * GIB,
    temporary_bytes=300 * GIB,
    max_files=1 << 20,
    max_processes=UNLIMITED,
    max_locked_bytes=UNLIMITED,
    num_gpus=8,
    num_visible=8,
    driver="570.86.15",
    infiniband=("mlx5_0",),
)


def test_a_fit_machine_has_nothing_to_do() -> None:
    found = examine(FIT)
    assert {finding.state for finding in found} == {State.GOOD}
    assert all(not finding.remedy for finding in found)
    assert Finding("GPUs", State.GOOD, "8, driver 570.86.15") in found


@pytest.mark.parametrize(
    ("change", "topic", "state", "value", "remedy"),
    [
        ({"addresses": None}, "host name", State.BAD, "node7 does not resolve", "Add node7 to DNS"),
        ({"addresses": None, "has_others": False}, "host name", State.DOUBTFUL, "node7 does not", "Add node7"),
        ({"addresses": ("127.0.1.1",)}, "host name", State.DOUBTFUL, "cannot come", "GLOO_SOCKET_IFNAME=eth0"),
        ({"own_address": ""}, "way to node 0", State.BAD, "none", "ip route"),
        ({"cpu_quota": 2.5}, "cores", State.DOUBTFUL, "may use 2.5", "OMP_NUM_THREADS"),
        ({"load": 97.0}, "cores", State.DOUBTFUL, "load 97.0", "top"),
        ({"available_bytes": GIB}, "free memory", State.DOUBTFUL, "1 GiB", "top"),
        ({"shared_bytes": 64 << 20}, "shared memory", State.DOUBTFUL, "64 MiB", "--shm-size"),
        ({"temporary_bytes": 0}, "free for temporary files", State.DOUBTFUL, "0 bytes", "TMPDIR"),
        ({"max_files": 1024}, "open files", State.DOUBTFUL, "1024", "ulimit -n"),
        ({"max_processes": 512}, "processes", State.DOUBTFUL, "512", "ulimit -u"),
        ({"max_locked_bytes": 65536}, "locked memory", State.DOUBTFUL, "64 KiB", "memlock"),
        ({"num_gpus": 0}, "GPUs", State.BAD, "8, driver 570.86.15; torch can use none", "Install a build of torch"),
        ({"num_gpus": 0, "num_visible": 0}, "GPUs", State.DOUBTFUL, "0, driver 570", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_wrong_is_found_and_has_a_remedy(
    change: dict[str, object], topic: str, state: State, value: str, remedy: str
) -> None:
    found = [one for one in examine(replace(FIT, **change)) if one.state is not State.GOOD]  # type: ignore[arg-type]
    assert [(one.topic, one.state) for one in found] == [(topic, state)]
    assert value in found[0].value
    assert remedy in found[0].remedy


def test_this_machine_is_read() -> None:
    machine = look("127.0.0.1", 0)
    assert (machine.own_address, machine.has_others) == ("127.0.0.1", True)
    assert machine.interface == "lo"
    assert machine.num_cores >= 1
    assert machine.available_bytes is None or machine.available_bytes > 0
    assert look(None, 0).has_others is False


@given(num_nodes=st.integers(1, 40))
def test_every_pair_is_measured_once_and_alone(num_nodes: int) -> None:
    planned = rounds(num_nodes, max_rounds=100)
    assert sorted(pair for pairs in planned for pair in pairs) == list(combinations(range(num_nodes), 2))
    for pairs in planned:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
    assert len(rounds(num_nodes)) <= 15


def measured(num_nodes: int, slow: int | None = None, broken: int | None = None) -> dict[tuple[int, int], Measured]:
    found = {}
    for pair in combinations(range(num_nodes), 2):
        if broken in pair:
            found[pair] = Measured(problem="it timed out")
        else:
            found[pair] = Measured(1e9 if slow in pair else 10e9, 20e-6)
    return found


HOSTS = ["a", "b", "c", "d"]


def test_a_good_network_is_one_line() -> None:
    assert judge(HOSTS, measured(4)) == {
        ALL: [Finding("network", State.GOOD, "10 GB/s, 20 us between two nodes (slowest pair 10 GB/s)")]
    }
    assert judge(["a"], {}) == {}


def test_the_slow_node_is_named() -> None:
    found = judge(HOSTS, measured(4, slow=2))
    assert found.keys() == {ALL, "c"}
    assert found["c"][0].state is State.DOUBTFUL
    assert found["c"][0].value == "1 GB/s, 10% of what the other nodes have"


def test_the_node_that_cannot_be_reached_is_named() -> None:
    found = judge(HOSTS, measured(4, broken=1))
    assert found.keys() == {ALL, "b"}
    assert (found["b"][0].state, found["b"][0].value) == (State.BAD, "no connection with a, c, d: it timed out")
    assert judge(["a", "b"], measured(2, broken=0)).keys() == {"b"}


def test_what_is_alike_is_said_once_and_the_worst_comes_first() -> None:
    good, doubtful = (
        Finding("cores", State.GOOD, "8"),
        Finding("shared memory", State.DOUBTFUL, "64 MiB", "make it larger"),
    )
    bad = Finding("host name", State.BAD, "b does not resolve", "add it")
    findings: Findings = {
        "a": [doubtful, good],
        "b": [doubtful, good, bad],
        ALL: [Finding("network", State.GOOD, "ok")],
    }
    assert as_text(findings).splitlines() == [
        "looked at      is                        where",
        "shared memory  look  64 MiB              all nodes",
        "cores          good  8                   all nodes",
        "host name      bad   b does not resolve  b",
        "network        good  ok                  all nodes",
        "",
        "what to do:",
        "  1. host name (b): add it",
        "  2. shared memory (all nodes): make it larger",
    ]
    assert is_bad(findings)
    assert as_json(findings)["is_fit"] is False
    assert as_json({"a": [good]}) == {
        "is_fit": True,
        "findings": [{"where": "a", "topic": "cores", "state": "good", "value": "8", "remedy": ""}],
    }
    assert as_text({"a": [good]}).endswith("nothing is in the way of a job")
    assert [Finding.from_plain(one.to_plain()) for one in (good, bad)] == [good, bad]
