"""Benchmarks of networks: their steps on ranks, what rank 0 tells who started it, and how fast hosts send."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import disttrain
from disttrain.testing import RankPool, run_threads
from tests.surroundings.network_hosts import Switch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
FLAGS = "--parallelisms fsdp tp hsdp --shapes 32x2 --heads 4 --vocab 32 --seq 8 --rounds 2 --warmups 0"


def loaded(name: str) -> Any:
    sys.path.insert(0, BENCHMARKS)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(BENCHMARKS)


def case_of_each(folder: str) -> dict[str, Any]:
    """Rank task: what is told of each case."""
    turns = loaded("networks.turns")
    parser = argparse.ArgumentParser()
    turns.add_options(parser, device="cpu", ranks_per_host=1, until=math.inf)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=disttrain.get_rank(), world_size=disttrain.get_world_size()
    )
    found: list[Any] = []
    try:
        turns.run(parser.parse_args(FLAGS.split()), turns.Weather(1, 100), found.append)
    finally:
        torch.distributed.destroy_process_group()
    return {"found": [[each.case, each.row.columns, each.loss_gap, len(each.times_s["torch"])] for each in found]}


@pytest.mark.sweep(0)
def test_sides_take_turns_and_train_alike(rank_pool: RankPool, tmp_path: Path) -> None:
    told = rank_pool.run(4, case_of_each, {"folder": str(tmp_path)})
    for each in told:
        kinds = ("fsdp", "tp", "hsdp (one rank a host)")
        assert [name for name, *_ in each["found"]] == [
            f"{kind}, 4 ranks, dim 32 x 2, 1 ms, 100 Mbit/s" for kind in kinds
        ]
        for _, columns, loss_gap, num_rounds in each["found"]:
            assert tuple(columns) == ("ours", "torch")
            assert loss_gap < 1e-5
            assert num_rounds == 2


@pytest.mark.parametrize(
    ("free", "num_turns", "optimizer"), [(1e9, 0, "adamw"), (10e9, 2, "sgd"), (20e9, 2, "adamw"), (80e9, 1, "adamw")]
)
def test_what_does_not_fit_at_once_comes_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, free: float, num_turns: int, optimizer: str
) -> None:
    turns = loaded("networks.turns")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80e9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    parser = argparse.ArgumentParser()
    # 0.56e9 parameters: 9.5e9 bytes with averages, 5.1e9 without, and 2.3e9 on each rank.
    turns.add_options(parser, device="cuda", ranks_per_host=1, dim=2048, layers=12, parallelism="fsdp")
    for plan in run_threads(2, lambda: turns.plan_of(parser.parse_args([]), turns.Clock(100.0))):
        assert (len(plan.turns), plan.optimizer) == (num_turns, optimizer)


RANK_0 = """
print('@found {"case": "fsdp", "times_s": {"ours": [1.0]}, "losses": {"ours": [2.0]}}')
print("no line of ours")
raise SystemExit(3)
"""


def test_what_rank_0_tells_is_kept_and_its_failure_said(capsys: pytest.CaptureFixture[str]) -> None:
    job, turns = loaded("networks.job"), loaded("networks.turns")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    first = subprocess.Popen([sys.executable, "-S", "-c", RANK_0], text=True, **pipes)
    kept: list[int] = []
    ended: list[str] = []
    listener = job.Listener(lambda found: kept.append(len(found)), 60)
    listener.follow([first], 60, lambda: ended.append("all"))
    assert kept == [1]
    assert listener.found == [turns.Found("fsdp", {"ours": [1.0]}, {"ours": [2.0]})]
    assert ended == ["all"]
    assert listener.problems == ["rank 0 ended with 3:\n"]
    said = capsys.readouterr().out
    assert "no line of ours\n" in said
    assert said.startswith("fsdp ")


def test_a_host_sends_no_faster_than_it_may() -> None:
    switch = Switch()
    ends = []
    for number in (1, 2):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        switch.plug_in(number, ours.detach())
        ends.append(theirs)
    switch.weather.bytes_per_s = 100_000
    packet = bytes([0x45, *[0] * 18, 2]).ljust(1000, b"x")  # of IPv4, for host 2
    start_s = time.monotonic()
    for _ in range(3):
        ends[0].send(packet)
    came_s = [time.monotonic() - start_s for _ in range(3) if os.read(ends[1].fileno(), 2000) == packet]
    switch.close()
    for end in ends:
        end.close()
    assert len(came_s) == 3
    assert all(came >= at for came, at in zip(came_s, (0.01, 0.02, 0.03), strict=True))
