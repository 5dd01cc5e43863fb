"""Benchmarks of networks: their steps on ranks, what rank 0 tells who started it, and how fast hosts send."""

from __future__ import annotations

import argparse
import importlib
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
from disttrain.testing import RankPool
from tests.network_hosts import Switch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
FLAGS = "--parallelisms fsdp tp hsdp --dims 32 --layers 2 --heads 4 --vocab 32 --seq 8 --rounds 2 --warmups 0"


def loaded(name: str) -> Any:
    sys.path.insert(0, BENCHMARKS)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(BENCHMARKS)


def case_of_each(folder: str) -> dict[str, Any]:
    """Rank task: what is told of each case, and which weather is asked for."""
    turns = loaded("networks.turns")
    parser = argparse.ArgumentParser()
    turns.add_options(parser, device="cpu", ranks_per_host=1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=disttrain.get_rank(), world_size=disttrain.get_world_size()
    )
    found: list[Any] = []
    weathers: list[str] = []
    try:
        wanted = [turns.Weather(0), turns.Weather(1, 100)]
        turns.run(parser.parse_args(FLAGS.split()), wanted, lambda weather: weathers.append(str(weather)), found.append)
    finally:
        torch.distributed.destroy_process_group()
    return {
        "weathers": weathers,
        "found": [[each.case, each.row.columns, each.loss_gap, len(each.times_s["torch"])] for each in found],
    }


def test_sides_take_turns_in_each_weather_and_train_alike(rank_pool: RankPool, tmp_path: Path) -> None:
    told = rank_pool.run(2, case_of_each, {"folder": str(tmp_path)})
    for each in told:
        assert each["weathers"] == ["0 ms", "0 ms", "1 ms, 100 Mbit/s"] * 2
        names = [name for name, *_ in each["found"]]
        assert names == [
            f"{kind}, 2 ranks, dim 32 x 2, {weather}"
            for kind in ("fsdp", "tp")
            for weather in ("0 ms", "1 ms, 100 Mbit/s")
        ]
        for _, columns, loss_gap, num_rounds in each["found"]:
            assert tuple(columns) == ("ours", "torch")
            assert loss_gap < 1e-5
            assert num_rounds == 2


RANK_0 = """
print('@found {"case": "fsdp", "times_s": {"ours": [1.0]}, "losses": {"ours": [2.0]}}')
print('@weather {"delay_ms": 10, "mbit_s": 0}', flush=True)
input()
print("no line of ours")
raise SystemExit(3)
"""


def test_what_rank_0_tells_is_kept_and_its_failure_said(capsys: pytest.CaptureFixture[str]) -> None:
    job, turns = loaded("networks.job"), loaded("networks.turns")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE}
    first = subprocess.Popen([sys.executable, "-S", "-c", RANK_0], text=True, **pipes)
    kept: list[int] = []
    weathers: list[Any] = []
    ended: list[str] = []
    listener = job.Listener(lambda found: kept.append(len(found)), 60)
    listener.change = weathers.append
    listener.follow([first], lambda: ended.append("all"))
    assert kept == [1]
    assert listener.found == [turns.Found("fsdp", {"ours": [1.0]}, {"ours": [2.0]})]
    assert weathers == [turns.Weather(10, 0)]
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
