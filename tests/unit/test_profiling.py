"""What a profile says: the division of a step's time, a trace that has GPUs in it, one file of several ranks."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import disttrain
from disttrain.errors import SettingError
from disttrain.flight_recorder.live.step_tally import Ended
from disttrain.profiling.breakdown import Breakdown, RankTimes, times_of_rank
from disttrain.profiling.merged_trace import part_of_rank, write_merged
from disttrain.profiling.rank_trace import read_rank_trace
from disttrain.store import HashStore
from disttrain.store.clock import ask_clock, serve_clock
from disttrain.testing import run_threads

BASE_NS = 1_700_000_000_000_000_000
GPU, HOST = 0, 4242


def test_on_the_host_a_wait_within_an_operator_is_a_wait() -> None:
    times = times_of_rank(
        3,
        2,
        (0, 1000),
        computing=[(100, 500), (450, 600), (900, 2000)],
        communication={"tp": [(200, 300)], "dp": [(250, 350), (700, 750)]},
        data_waits=[(550, 650)],
        on_device=False,
    )
    # Of 1,000: dp 150, of tp's 50 beside it, data 100, of operators' 600 those 400 in which nothing is waited for.
    assert {axis: round(value * 2e9) for axis, value in times.communication_s.items()} == {"dp": 150, "tp": 50}
    assert [round(value * 2e9) for value in (times.data_wait_s, times.computing_s)] == [100, 400]
    parts_s = times.computing_s + sum(times.communication_s.values()) + times.data_wait_s + times.host_bound_s
    assert parts_s == pytest.approx(times.step_s) == pytest.approx(500e-9)


def test_on_a_device_computing_hides_communication() -> None:
    times = times_of_rank(0, 1, (0, 100), [(10, 50)], {"dp": [(30, 70)]}, data_waits=[(60, 90)], on_device=True)
    assert round(times.computing_s * 1e9) == 40
    assert round(times.communication_s["dp"] * 1e9) == 20
    assert round(times.data_wait_s * 1e9) == 20
    assert round(times.host_bound_s * 1e9) == 20


def _event(
    name: str, cat: str, began_us: float, ended_us: float, pid: int = HOST, tid: int = 1, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": cat, "ts": began_us, "dur": ended_us - began_us, "pid": pid, "tid": tid,
        "args": args,
    }  # fmt: skip


def _gpu_trace() -> dict[str, Any]:
    """A step of a rank with a GPU, in torch's form: two collectives of two axes, a copy to a peer, two kernels."""
    return {
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": HOST, "tid": 1, "args": {"name": "thread 1 (python)"}},
            {"ph": "M", "name": "thread_name", "pid": GPU, "tid": 7, "args": {"name": "stream 7 "}},
            _event("ProfilerStep#4", "user_annotation", 0, 100),
            _event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", 0, 10),
            _event("collective all_reduce [dp]", "user_annotation", 20, 30),
            _event("nccl:all_reduce", "user_annotation", 22, 28, **{"External id": 9}),
            _event("nccl:all_reduce", "gpu_user_annotation", 30, 60, GPU, 20, **{"External id": 9}),
            _event("cudaLaunchKernelExC", "cuda_runtime", 25, 26, correlation=1),
            _event("pipeline stage 0 microbatch 1 send forward to stage 1", "user_annotation", 30, 40),
            _event("message send [pp]", "user_annotation", 31, 39),
            _event("cudaMemcpyAsync", "cuda_runtime", 35, 36, correlation=2),
            _event("cudaLaunchKernel", "cuda_runtime", 50, 51, correlation=3),
            _event("ncclDevKernel_AllReduce_Sum", "kernel", 30, 60, GPU, 20, correlation=1),
            _event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 60, 70, GPU, 21, correlation=2),
            _event("gemm", "kernel", 50, 65, GPU, 7, correlation=3),
            _event("gemm", "kernel", 90, 120, GPU, 7, correlation=4),
            _event("ncclDevKernel_Broadcast", "kernel", 70, 75, GPU, 20, correlation=5, **{"Process Group Name": "g1"}),
            {"ph": "s", "id": 3, "pid": HOST, "tid": 1, "ts": 50, "cat": "ac2g", "name": "ac2g"},
            {"ph": "f", "id": 3, "pid": GPU, "tid": 7, "ts": 50, "cat": "ac2g", "name": "ac2g", "bp": "e"},
            {
                "ph": "X",
                "name": "PyTorch Profiler (0)",
                "cat": "Trace",
                "pid": "Spans",
                "tid": "PyTorch Profiler",
                "ts": 0,
            },
        ],
    }


def test_kernels_are_of_the_axis_that_launched_them() -> None:
    found = read_rank_trace(_gpu_trace(), [4], {"g1": "tp"})
    assert found.on_device
    assert found.window == (BASE_NS, BASE_NS + 120_000)  # the device ends after the host
    assert found.communication == {
        "dp": [(BASE_NS + 30_000, BASE_NS + 60_000)],
        "pp": [(BASE_NS + 60_000, BASE_NS + 70_000)],
        "tp": [(BASE_NS + 70_000, BASE_NS + 75_000)],
    }
    times = times_of_rank(0, 1, found.window, found.computing, found.communication, found.data_waits, on_device=True)
    shown = {axis: round(value * 1e6) for axis, value in times.communication_s.items()}
    assert shown == {"dp": 20, "pp": 5, "tp": 5}
    assert [round(value * 1e6) for value in (times.computing_s, times.data_wait_s, times.host_bound_s)] == [45, 10, 35]


def test_one_file_has_a_process_for_each_rank(tmp_path: Path) -> None:
    calls = [Ended("world", "dp", "all_reduce", BASE_NS + 20_000, BASE_NS + 25_000, BASE_NS + 60_000)]
    parts = [
        part_of_rank(_gpu_trace(), 0, "here:1", BASE_NS, 0, calls, {}),
        part_of_rank(_gpu_trace(), 1, "there:1", BASE_NS, -5_000, [], {}),
    ]
    for name in ("trace.json", "deeper/trace.json.gz"):
        file = tmp_path / name
        write_merged(file, parts)
        data = gzip.decompress(file.read_bytes()) if name.endswith("gz") else file.read_bytes()
        events = json.loads(data)["traceEvents"]
        names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert names == {"rank 0", "rank 1"}
        threads = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0}
        assert threads >= {"main thread", "GPU 0 stream 7", "communication dp"}
        starts_us = {event["pid"]: event["ts"] for event in events if event["name"] == "ProfilerStep#4"}
        assert starts_us == {0: 0.0, 1: -5.0}
        assert len({event["id"] for event in events if "id" in event}) == 2
        assert all(isinstance(event["pid"], int) for event in events)
        on_gpu = {event["name"] for event in events if event.get("cat") in ("kernel", "gpu_user_annotation")}
        assert on_gpu >= {"nccl:all_reduce [dp]", "ncclDevKernel_AllReduce_Sum [dp]", "gemm"}
        (call,) = (event for event in events if event.get("cat") == "communication")
        assert (call["name"], call["ts"], call["dur"], call["args"]) == (
            "all_reduce [dp]",
            20.0,
            40.0,
            {"waited_us": 35.0},
        )
        assert [path.name for path in file.parent.iterdir() if path.is_file()] == [file.name]


def test_the_table_names_axes_means_and_what_is_missing() -> None:
    ranks = tuple(
        RankTimes(rank, 3, 0.1, 0.05 + rank / 100, {"dp": 0.02, **({"tp": 0.01} if rank else {})}, 0.01, 0.01)
        for rank in range(2)
    )
    shown = str(Breakdown(ranks, Path("t.json"), {2: "has raised ValueError: no"}, (1,)))
    lines = shown.splitlines()
    assert lines[0] == "ms per step, of 3 steps"
    assert lines[1].split("  ")[0] == "rank"
    assert "exposed dp" in lines[1]
    assert lines[3].split() == ["1", "100.00", "60.00", "20.00", "10.00", "10.00", "10.00"]
    assert lines[4].split() == ["mean", "100.00", "55.00", "20.00", "5.00", "10.00", "10.00"]
    assert lines[5].split() == ["share", "100%", "55%", "20%", "5%", "10%", "10%"]
    assert lines[6] == "rank 2: has raised ValueError: no"
    assert "rank 1: its clock" in lines[7]
    assert str(Breakdown((), None, {})) == "nothing was recorded"


def test_a_process_alone_profiles_without_a_job(tmp_path: Path) -> None:
    file = tmp_path / "alone.json"
    with disttrain.profile(file, wait=1, warmup=1, active=2) as profiler:
        for _ in range(5):
            torch.ones(64, 64) @ torch.ones(64, 64)
            profiler.step()
    assert profiler.breakdown is not None
    (times,) = profiler.breakdown.ranks
    assert times.num_steps == 2
    assert 0 < times.computing_s < times.step_s
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["name"].startswith("ProfilerStep")} == {
        "ProfilerStep#2",
        "ProfilerStep#3",
    }
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("disttrain profile")]


def test_without_steps_the_block_is_recorded_or_nothing(tmp_path: Path) -> None:
    with disttrain.profile(tmp_path / "block.json", wait=0, warmup=0) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert profiler.breakdown is not None
    assert [times.num_steps for times in profiler.breakdown.ranks] == [0]
    assert "without a call of step()" in str(profiler.breakdown)
    for steps in (0, 1, 2):
        with disttrain.profile(tmp_path / "none.json") as profiler:
            for _ in range(steps):
                profiler.step()
        if steps < 2:
            assert str(profiler.breakdown).startswith("nothing was recorded")
            assert f"step() was called {steps} times" in str(profiler.breakdown)
            assert not (tmp_path / "none.json").exists()


def test_cycles_have_files_of_their_own(tmp_path: Path) -> None:
    found: list[Breakdown] = []
    with disttrain.profile(
        tmp_path / "t.json.gz", wait=1, warmup=1, active=1, repeat=2, on_ready=found.append
    ) as profiler:
        for _ in range(9):
            profiler.step()
    assert [breakdown.file.name for breakdown in found if breakdown.file] == ["t.json.gz", "t.2.json.gz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.2.json.gz", "t.json.gz"]


def test_a_profile_within_a_profile_is_refused(tmp_path: Path) -> None:
    with disttrain.profile(tmp_path / "outer.json"):
        inner = disttrain.profile(tmp_path / "inner.json")
        with pytest.raises(SettingError, match="a profiler runs in this process already"), inner:
            pass
    with torch.profiler.profile(), pytest.raises(SettingError, match="a profiler runs"):
        disttrain.profile(tmp_path / "inner.json").__enter__()
    # The refused ones have left nothing behind.
    with disttrain.profile(tmp_path / "again.json", wait=0, warmup=0):
        pass
    assert (tmp_path / "again.json").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"active": 0}, "active=0 is less than 1"),
        ({"wait": -1}, "wait=-1 is less than 0"),
        ({"ranks": [0, 1]}, "ranks=\\[0, 1\\] of a world with ranks 0 to 0"),
        ({"ranks": []}, "ranks=\\[\\] of a world"),
    ],
)
def test_numbers_that_cannot_be(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        disttrain.profile("never.json", **wrong).__enter__()


def test_an_error_leaves_what_was_recorded(tmp_path: Path) -> None:
    profiler = disttrain.profile(tmp_path / "t.json", wait=0, warmup=0, active=5)

    def train() -> None:
        with profiler:
            for step in range(5):
                torch.ones(8, 8) @ torch.ones(8, 8)
                if step == 2:
                    raise ValueError("a bad batch")
                profiler.step()

    with pytest.raises(ValueError, match="a bad batch"):
        train()
    assert profiler.breakdown is not None
    (times,) = profiler.breakdown.ranks
    assert (times.num_steps, times.raised) == (2, "ValueError: a bad batch")
    assert (tmp_path / "t.json").exists()


def test_another_machine_s_clock_is_asked_for() -> None:
    """As on hosts whose clocks differ by a second: the shift is that, within the time of a question."""
    store = HashStore()
    served = store.clone()
    threading.Thread(target=serve_clock, args=[served, lambda: __import__("time").time() + 1.0], daemon=True).start()
    answer = ask_clock(store)
    served.close()
    assert answer is not None
    assert answer[0] == pytest.approx(1.0, abs=0.05)


def test_ranks_that_are_threads_are_told_that_there_is_one_profiler(tmp_path: Path) -> None:
    def enter() -> str:
        disttrain.barrier()
        try:
            with disttrain.profile(tmp_path / "t.json", wait=0, warmup=0):
                disttrain.barrier()
                return "profiled"
        except SettingError as error:
            disttrain.barrier()
            return str(error)

    found = run_threads(2, enter)
    assert sorted(text == "profiled" for text in found) == [False, True]
