"""Time that a collective takes by its ranks' number, and links that were measured: what the planner makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from disttrain.doctor.links import LinkOfPair, Links, merged, read_links
from disttrain.errors import SettingError
from disttrain.plan import HARDWARE, PRESETS, Choice, Job, LlamaSizes, MeshSizes, find_plans, plan_of, traffic_of
from disttrain.plan.cli import main
from disttrain.plan.time.collective_times import TREE_RATE, Link
from disttrain.plan.time.links import link_of

NETWORK = Link(latency_s=50e-6, bytes_per_s=1e9, num_ranks=8, num_nodes=8, network_step_s=10e-6)
LINKS = Links(
    "gloo",
    ("a", "b", "c"),
    2,
    (LinkOfPair(0, 1, 1e-3, 4e9), LinkOfPair(0, 2, 2e-3, 2e9), LinkOfPair(1, 2, 3e-3, 3e9)),
    gather_s=5e-3,
)


def test_two_ranks_are_one_hop() -> None:
    pair = replace(NETWORK, num_ranks=2, num_nodes=2)
    assert pair.gather_latency_s == 50e-6
    assert pair.seconds(1e6) == pytest.approx(50e-6 + 1e-3)
    assert pair.seconds(1e6, 3) == pytest.approx(150e-6 + 1e-3)
    assert pair.all_reduce_latencies_s == pytest.approx({"ring": 60e-6, "tree": 60e-6})


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 16, 100])
def test_a_ring_has_a_hop_for_each_rank(num_ranks: int) -> None:
    ring = replace(NETWORK, num_ranks=num_ranks, num_nodes=num_ranks)
    assert ring.gather_latency_s == pytest.approx(50e-6 + (num_ranks - 2) * 10e-6)
    assert ring.all_reduce_latencies_s["ring"] == pytest.approx(50e-6 + (2 * (num_ranks - 1) - 1) * 10e-6)


def test_hops_within_a_node_count_by_themselves() -> None:
    ring = replace(NETWORK, num_ranks=32, num_nodes=4, node_step_s=1e-6)
    assert ring.gather_latency_s == pytest.approx(50e-6 + 2 * 10e-6 + 28 * 1e-6)
    assert ring.all_reduce_latencies_s["tree"] == pytest.approx(50e-6 + 3 * 10e-6 + 14 * 1e-6)
    within = replace(ring, num_nodes=1)
    assert within.gather_latency_s == pytest.approx(50e-6 + 30 * 1e-6)


def test_an_all_reduce_takes_a_tree_while_it_is_small() -> None:
    ring = replace(NETWORK, num_ranks=64, num_nodes=64)
    latencies = ring.all_reduce_latencies_s
    assert ring.all_reduce_s(8) == pytest.approx(latencies["tree"] + 16 / TREE_RATE / 1e9)
    large = 1e9
    assert ring.all_reduce_s(large) == pytest.approx(latencies["ring"] + 2 * large * 63 / 64 / 1e9)


def test_steps_grow_with_nodes() -> None:
    """Of one model, as many bytes sent by each rank: what is left is what hops take."""
    sizes = LlamaSizes(dim=512, num_layers=12, num_heads=8, num_kv_heads=8, ffn_size=1408, vocab_size=4096)
    latencies, times = [], []
    for num_nodes in (2, 4, 16, 64):
        job = Job(sizes, 8 * num_nodes, HARDWARE["h100"], seq_size=512, num_sequences=64 * num_nodes)
        choice = Choice(MeshSizes(dp=8 * num_nodes), 8, 1)
        (traffic,) = traffic_of(job, choice)
        latencies.append(traffic.latency_s)
        times.append(plan_of(job, choice).times.shards)
    assert latencies == sorted(latencies)
    assert latencies[-1] - latencies[0] == pytest.approx(62 * 9.6e-6 + 434 * 1.9e-6)
    assert times == sorted(times)


def test_a_ring_of_measured_links_is_as_fast_as_its_slowest() -> None:
    assert LINKS.bytes_per_s == 2e9
    assert LINKS.latency_s == pytest.approx(2e-3)
    assert LINKS.step_s == pytest.approx(3e-3)
    # Of four nodes, two pairs are no neighbours.
    pairs = [LinkOfPair(a, b, 1e-3, 1e9 if (b - a) % 4 == 2 else 5e9) for a in range(4) for b in range(a + 1, 4)]
    four = Links("nccl", ("a", "b", "c", "d"), 8, tuple(pairs))
    assert four.bytes_per_s == 5e9
    assert four.step_s == four.latency_s
    assert replace(four, pairs=tuple(pairs[:2])).bytes_per_s == 1e9


def test_what_ranks_have_measured_is_merged() -> None:
    rows = [(0, 1, 1e-3, 4e9), (0, 1, 0.0, 3e9), (1, 2, 2e-3, 5e9), (0, 2, 0.0, 5e9)]
    found = merged("nccl", ["a", "b", "c"], 2, rows, 0.0)
    assert found.pairs == (LinkOfPair(0, 1, 1e-3, 3e9), LinkOfPair(1, 2, 2e-3, 5e9))
    lines = str(found).splitlines()
    assert lines[0].split() == ["by", "nccl", "us", "GB/s", "a", "rank", "GB/s", "a", "node"]
    assert lines[1].split() == ["a", "-", "b", "1000", "3", "6"]


def test_a_file_of_links_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(LINKS.to_json())
    assert read_links(path) == LINKS
    for wrong in ("{}", "[1]", "text", json.dumps({**json.loads(LINKS.to_json()), "pairs": []})):
        path.write_text(wrong)
        with pytest.raises(SettingError, match="--links"):
            read_links(path)
    with pytest.raises(SettingError, match="No such file"):
        read_links(tmp_path / "none.json")


def test_links_change_the_hardware_and_its_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hardware = HARDWARE["h100"].with_links(LINKS)
    job = Job(PRESETS["8b"], 24, hardware, num_sequences=48)
    link = link_of(job, Choice(MeshSizes(dp=24), 1, 2), "dp")
    assert (link.latency_s, link.network_step_s, link.num_nodes) == (LINKS.latency_s, LINKS.step_s, 3)
    assert link.bytes_per_s == 8 * 2e9
    path = tmp_path / "links.json"
    path.write_text(LINKS.to_json())
    arguments = ["--model", "8b", "--gpus", "24", "--batch-tokens", str(48 * 8192), "--mesh", "dp=24"]
    assert main([*arguments, "--links", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA H100 SXM (measured links)" in printed.splitlines()[0]
    assert any("sent along dp" in line and "calls of 5.0 ms at least" in line for line in printed.splitlines())


def test_slow_links_choose_another_mesh() -> None:
    """Where each hop takes milliseconds, copies within nodes are gathered, and sums alone go over the network."""
    slow = replace(LINKS, pairs=tuple(replace(pair, bytes_per_s=50e9) for pair in LINKS.pairs), gather_s=40e-3)
    fast = replace(HARDWARE["h100"], network_latency_s=1e-6, network_step_s=1e-6)
    jobs = [
        Job(PRESETS["1b"], 24, hardware, num_sequences=24, seq_size=2048) for hardware in (fast, fast.with_links(slow))
    ]
    near, far = (find_plans(job, num_plans=1).plans[0] for job in jobs)
    assert near.choice.mesh != far.choice.mesh
    again = plan_of(jobs[1], near.choice)
    assert again.times.step_s > far.times.step_s
