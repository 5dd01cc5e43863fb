"""What a person sees who profiles training on several ranks: names in torch's traces, one file, a table."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import tp
from disttrain.flight_recorder import StepSummaries, enable
from disttrain.fsdp2 import fully_shard
from disttrain.pipelining import PipelineStage, Schedule1F1B
from disttrain.testing import RankPool

NUM_STEPS = 5


def _names(run: Callable[[], object]) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    return {event.name for event in profiler.events() or ()}


def _mesh(**axes: int) -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _sharded(mesh: disttrain.DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _names_of_fully_shard() -> set[str]:
    model = _sharded(_mesh(dp=2))
    return _names(lambda: model(torch.ones(4, 8)).sum().backward())


def test_torchs_profiler_names_the_phases_of_fully_shard(rank_pool: RankPool) -> None:
    for names in rank_pool.run(2, _names_of_fully_shard):
        for layer in ("0", "1"):
            for phase in ("gather", "wait for gather", "free", "reduce", "wait for reduce"):
                assert f"fully_shard {phase} {layer}" in names
        assert {"collective all_gather_into_tensor [dp]", "wait all_gather_into_tensor [dp]"} <= names
        assert {"collective reduce_scatter_tensor [dp]", "wait reduce_scatter_tensor [dp]"} <= names


def _names_of_a_pipeline() -> set[str]:
    group = _mesh(pp=2).get_group()
    torch.manual_seed(0)
    stage = PipelineStage(nn.Linear(8, 8), group.group_rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda output, target: (output - target).square().sum())
    batch, target = torch.ones(4, 8), torch.zeros(4, 8)

    def step() -> None:
        if group.group_rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=target)

    step()
    return _names(step)


def test_torchs_profiler_names_the_actions_of_a_pipeline(rank_pool: RankPool) -> None:
    first, last = rank_pool.run(2, _names_of_a_pipeline)
    for microbatch in (0, 1):
        assert f"pipeline stage 0 microbatch {microbatch} forward" in first
        assert f"pipeline stage 0 microbatch {microbatch} send forward to stage 1" in first
        assert f"pipeline stage 0 microbatch {microbatch} receive backward from stage 1" in first
        assert f"pipeline stage 1 microbatch {microbatch} backward" in last
    assert {"message send [pp]", "message recv [pp]", "wait recv [pp]"} <= first


def _names_of_tensor_parallel() -> tuple[set[str], set[str]]:
    mesh = _mesh(tp=2)
    found = []
    for plan in (
        {"0": tp.ColwiseParallel(), "1": tp.RowwiseParallel()},
        {
            "0": tp.ColwiseParallel(input_layouts=disttrain.dtensor.Shard(0)),
            "1": tp.RowwiseParallel(output_layouts=disttrain.dtensor.Shard(0)),
        },
    ):
        torch.manual_seed(0)
        model = tp.parallelize_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh, plan)
        x = torch.ones(4, 8, requires_grad=True)
        found.append(_names(lambda model=model, x=x: model(x).sum().backward()))  # type: ignore[misc]
    return found[0], found[1]


def test_torchs_profiler_names_the_exchanges_of_tensor_parallel(rank_pool: RankPool) -> None:
    for whole, parts in rank_pool.run(2, _names_of_tensor_parallel):
        assert {"tensor parallel all_reduce", "tensor parallel start all_reduce", "collective all_reduce [tp]"} <= whole
        assert {"tensor parallel gather and multiply", "tensor parallel multiply and scatter"} <= parts
        assert {"collective all_gather_into_tensor [tp]", "collective reduce_scatter_tensor [tp]"} <= parts


def _names_of_calls() -> set[str]:
    mesh = _mesh(dp=2, tp=1)
    group = mesh.get_group("dp")

    def calls() -> None:
        disttrain.all_reduce(torch.ones(4), group=group)
        work = disttrain.all_reduce(torch.ones(4), group=group, async_op=True)
        assert work is not None
        work.wait()
        disttrain.barrier()
        with disttrain.coalescing_manager(group):
            disttrain.all_reduce(torch.ones(4), group=group)
        other = 1 - disttrain.get_rank()
        messages = [
            disttrain.P2POp(disttrain.isend, torch.ones(2), other, group),
            disttrain.P2POp(disttrain.irecv, torch.ones(2), other, group),
        ]
        for message in disttrain.batch_isend_irecv(messages):
            message.wait()
        doubled = torch.compile(
            lambda x: disttrain.process_group.functional.all_reduce(x, "sum", group) * 2, fullgraph=True
        )
        assert doubled(torch.ones(4)).tolist() == [4.0] * 4

    return _names(calls)


def test_torchs_profiler_names_collectives_with_their_axis(rank_pool: RankPool) -> None:
    for names in rank_pool.run(2, _names_of_calls):
        assert {
            "collective all_reduce [dp]",
            "wait all_reduce [dp]",
            "message send [dp]",
            "message recv [dp]",
            "wait recv [dp]",
            "collective coalesced [dp]",
        } <= names
        assert names & {"collective barrier [world]", "collective barrier [dp]"}


def _compute(seconds: float) -> None:
    """With torch's operators, for so long."""
    end_s = time.perf_counter() + seconds
    x = torch.ones(128, 128)
    while time.perf_counter() < end_s:
        torch.mm(x, x)


def _profiled(file: str, ranks: list[int] | None = None) -> dict[str, Any]:
    """The breakdown in plain values, and the recorder's share of waiting for the same steps; on other ranks nothing."""
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    disttrain.barrier()  # before the mesh gives the group an axis: it is of that all the same
    dp = _mesh(dp=size).get_group()
    disttrain.barrier()
    summaries = None
    with disttrain.profile(file, wait=1, warmup=1, active=3, ranks=ranks) as profiler:
        for step in range(NUM_STEPS + 1):
            if step == 2:
                summaries = StepSummaries(enable(), heard.put, every_steps=3)
            with torch.profiler.record_function("data wait"):
                time.sleep(0.005)
            hidden = disttrain.all_reduce(torch.ones(64), group=dp, async_op=True)
            _compute(0.16 if rank else 0.01)
            assert hidden is not None
            hidden.wait()
            if summaries is not None:
                summaries.step()
            profiler.step()
    summary = {} if rank or size == 1 else heard.get(timeout=60)
    disttrain.barrier()
    assert summaries is not None
    summaries.close()
    breakdown = profiler.breakdown
    if breakdown is None:
        return {}
    return {
        "ranks": [asdict(times) for times in breakdown.ranks],
        "exposed_share": sum(breakdown.communication_s.values()) / breakdown.step_s,
        "waiting_share": summary.get("waiting_share"),
        "table": str(breakdown),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_profile_of_all_ranks(rank_pool: RankPool, tmp_path: Path, world_size: int) -> None:
    file = tmp_path / "trace.json"
    found, *others = rank_pool.run(world_size, _profiled, {"file": str(file)})
    assert others == [{}] * (world_size - 1)
    ranks = found["ranks"]
    assert [(times["rank"], times["num_steps"]) for times in ranks] == [(rank, 3) for rank in range(world_size)]
    assert f"trace: {file}" in found["table"]
    # Sleeping takes at least as long as it was asked for, and on busy cores longer.
    assert all(0.005 <= times["data_wait_s"] < times["step_s"] / 2 for times in ranks)
    if world_size > 1:
        # Rank 0 computes for 150 ms less than others, and waits for them. The recorder says the same of these steps.
        assert ranks[0]["communication_s"]["dp"] > ranks[1]["communication_s"]["dp"]
        assert found["exposed_share"] == pytest.approx(found["waiting_share"], abs=0.05)
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event.get("name") == "process_name"} == set(range(world_size))
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    assert {(event["pid"], event["name"]) for event in steps} == {
        (rank, f"ProfilerStep#{step}") for rank in range(world_size) for step in (2, 3, 4)
    }
    # By one clock: nobody leaves a step's all_reduce before all have come to it.
    calls = [event for event in events if event.get("cat") == "communication" and event["name"] == "all_reduce [dp]"]
    if world_size > 1:
        by_rank = [
            sorted((e["ts"], e["ts"] + e["dur"]) for e in calls if e["pid"] == rank) for rank in range(world_size)
        ]
        assert [len(spans) for spans in by_rank] == [3] * world_size
        for spans in zip(*by_rank, strict=True):
            assert max(began for began, _ in spans) < min(ended for _, ended in spans) + 500  # microseconds


def test_some_ranks_of_many(rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(3, _profiled, {"file": str(tmp_path / "trace.json"), "ranks": [1, 2]})
    assert [times["rank"] for times in found[0]["ranks"]] == [1, 2]


def _raising(file: str, raises_on: int) -> tuple[str | None, float]:
    profiler = disttrain.profile(file, wait=0, warmup=0, active=4)
    began_s = 0.0
    try:
        with profiler:
            for step in range(4):
                disttrain.all_reduce(torch.ones(4))
                began_s = time.monotonic()
                if step == 2 and disttrain.get_rank() == raises_on:
                    raise ValueError("a bad batch")
                if step == 2:
                    break
                profiler.step()
    except ValueError:
        pass
    return (None if profiler.breakdown is None else str(profiler.breakdown)), time.monotonic() - began_s


@pytest.mark.parametrize("raises_on", [0, 1])
def test_a_rank_that_raises_leaves_its_part(rank_pool: RankPool, tmp_path: Path, raises_on: int) -> None:
    found = rank_pool.run(2, _raising, {"file": str(tmp_path / "trace.json"), "raises_on": raises_on})
    shown = found[0][0]
    assert shown is not None
    assert f"rank {raises_on} has raised ValueError: a bad batch" in shown
    assert "of 2 steps" in shown
    assert all(took_s < 20 for _, took_s in found)


def _silent(file: str) -> str | None:
    profiler = disttrain.profile(file, wait=0, warmup=0, active=2)
    if disttrain.get_rank() == 1:
        return None  # never enters it, as a process that is gone
    try:
        with profiler:
            profiler.step()
            profiler.step()
            raise ValueError("the other one is gone")
    except ValueError:
        return str(profiler.breakdown)


def test_a_rank_that_never_comes_is_named(rank_pool: RankPool, tmp_path: Path) -> None:
    shown = rank_pool.run(2, _silent, {"file": str(tmp_path / "trace.json")})[0]
    assert "rank 1: has sent nothing" in shown
    assert (tmp_path / "trace.json").exists()
