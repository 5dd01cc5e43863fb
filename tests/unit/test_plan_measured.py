"""The planner's estimates beside what was measured on H200s: the figures of the repository's own benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from disttrain.plan import HARDWARE, Choice, Job, LlamaSizes, MeshSizes, Plan, plan_of
from disttrain.plan.job import PURE

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SIZES = ("dim", "layers", "heads", "kv_heads", "ffn", "vocab")
MEMORY_WITHIN = 0.03
TIME_WITHIN = 0.04
CHOICES_WITHIN = 0.08
"""Of the planner's own benchmark, which runs many choices for three steps each."""
HOST_BOUND = "small_layers"
"""A model of which the host launches less than a GPU computes: the time is the machine's, hardly the planner's."""
HOSTS_WITHIN, CAPTURED_WITHIN = 0.3, 0.25
"""Of small models: hosts differ by a third, and small kernels attain less than the rates of large ones."""
SMALL = {
    "dim 512, 24 layers, 4 x 256": (LlamaSizes(512, 24, 8, 8, 1408, 8192), 256, 4),
    "dim 1024, 12 layers, 4 x 512": (LlamaSizes(1024, 12, 16, 8, 2816, 8192), 512, 4),
    "dim 2048, 4 layers, 2 x 2048": (LlamaSizes(2048, 4, 32, 8, 8192, 32000), 2048, 2),
}
"""Those of benchmarks/captured_step_gpu.py: sizes, tokens of a sequence, and sequences."""


class Case(NamedTuple):
    """One run of a benchmark, and what is asked of the planner."""

    name: str
    job: Job
    choice: Choice
    peak_gib: float
    step_ms: float

    @property
    def plan(self) -> Plan:
        return plan_of(self.job, self.choice)


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    # Newer ones have rows, and the report beside them.
    details: dict[str, Any] = found.get("details", found)
    return details


def _sizes(arguments: dict[str, Any]) -> LlamaSizes:
    return LlamaSizes(*(int(arguments[name]) for name in SIZES))


def _sharded() -> Iterator[Case]:
    for file, num_gpus in (("fsdp2_gpu.json", 4), ("fsdp2_gpu_2.json", 2)):
        for name, case in _read(file)["cases"].items():
            arguments = case["arguments"]
            batch_size = int(arguments["batch"])
            job = Job(
                _sizes(arguments),
                num_gpus,
                HARDWARE["h200"],
                node_size=num_gpus,
                seq_size=int(arguments["seq"]),
                num_sequences=batch_size * num_gpus,
                has_kernels=False,
                captures=False,
            )
            choice = Choice(MeshSizes(dp=num_gpus), batch_size, 1, is_compiled=arguments["compile"] == "True")
            measured = case["disttrain"]
            yield Case(f"{name}, dp={num_gpus}", job, choice, measured["peak_gib"], measured["step_ms"])


def _pure(sizes: LlamaSizes, num_gpus: int, seq_size: int, num_sequences: int) -> Job:
    """All in bfloat16, without fully_shard."""
    return Job(
        sizes,
        num_gpus,
        HARDWARE["h200"],
        node_size=num_gpus,
        seq_size=seq_size,
        num_sequences=num_sequences,
        precision=PURE,
        has_kernels=False,
        captures=False,
        has_lean_loss=False,
    )


def _tensor_parallel() -> Iterator[Case]:
    for file in ("tp_gpu_2.json", "tp_gpu_2_batch2.json"):
        found = _read(file)
        batch_size, seq_size = (int(found["arguments"][name]) for name in ("batch", "seq"))
        job = _pure(_sizes(found["arguments"]), 2, seq_size, batch_size)
        measured = found["disttrain"]
        choice = Choice(MeshSizes(tp=2), batch_size, 1)
        yield Case(f"tp=2, batch {batch_size}", job, choice, measured["peak_gib"], measured["step_ms"])


def _pipelines() -> Iterator[Case]:
    found = _read("pipeline_gpu.json")
    sizes = found["sizes"]
    job = _pure(_sizes(sizes), 4, sizes["seq"], sizes["microbatches"])
    for schedule, modes in found["results"].items():
        for mode, libraries in modes.items():
            choice = Choice(MeshSizes(pp=4), 1, sizes["microbatches"], schedule, is_compiled=mode == "compiled")
            measured = libraries["disttrain"]
            yield Case(f"{schedule}, {mode}", job, choice, measured["peak_gib"], measured["step_ms"]["median"])


def _choices(file: str) -> list[Case]:
    """Of one model: meshes, checkpoints, kernels, compiled blocks. Where ranks share GPUs, time says nothing."""
    found = _read(file)
    sizes, cases = found["sizes"], []
    for name, case in found["cases"].items():
        mesh = MeshSizes(**case["choice"].pop("mesh"))
        job = Job(
            _sizes(sizes),
            mesh.num_gpus,
            HARDWARE["h200"],
            node_size=mesh.num_gpus,
            seq_size=sizes["seq"],
            num_sequences=sizes["microbatches"],
            has_kernels=case["has_kernels"],
            captures=False,
            has_lean_loss=False,
        )
        measured = case["measured"]
        cases.append(Case(name, job, Choice(mesh, **case["choice"]), measured["peak_gib"], measured.get("step_ms", 0)))
    return cases


CASES = [*_sharded(), *_tensor_parallel(), *_pipelines()]
CHOICES, SHARED = _choices("plan_gpu_2.json"), _choices("plan_gpu_2_shared.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory(case: Case) -> None:
    assert case.plan.memory.total_bytes / 2**30 == pytest.approx(case.peak_gib, rel=MEMORY_WITHIN)


@pytest.mark.parametrize("case", [*CHOICES, *SHARED], ids=lambda case: case.name)
def test_memory_of_many_choices(case: Case) -> None:
    assert case.plan.memory.total_bytes / 2**30 == pytest.approx(case.peak_gib, rel=CHOICES_WITHIN)


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case.name)
def test_time_of_many_choices(case: Case) -> None:
    assert 1e3 * case.plan.times.step_s == pytest.approx(case.step_ms, rel=CHOICES_WITHIN)


def test_order_of_many_choices() -> None:
    """Of any two, where one takes at least a twentieth longer, so does its estimate."""
    for slow in CHOICES:
        for fast in CHOICES:
            if slow.step_ms > 1.05 * fast.step_ms:
                assert slow.plan.times.step_s > fast.plan.times.step_s, (slow.name, fast.name)


@pytest.mark.parametrize("case", [case for case in CASES if HOST_BOUND not in case.name], ids=lambda case: case.name)
def test_time(case: Case) -> None:
    assert 1e3 * case.plan.times.step_s == pytest.approx(case.step_ms, rel=TIME_WITHIN)


def _small(name: str, *, captures: bool) -> Plan:
    sizes, seq_size, batch_size = SMALL[name]
    job = Job(sizes, 1, HARDWARE["h100"], node_size=1, seq_size=seq_size, num_sequences=batch_size, captures=captures)
    return plan_of(job, Choice(MeshSizes(dp=1), batch_size, 1, is_compiled=True))


@pytest.mark.parametrize("name", SMALL)
def test_time_of_small_models_captured_and_not(name: str) -> None:
    """The host is the bound of both smaller ones as they are, and of none that is captured."""
    rows = json.loads((RESULTS / "captured_step_gpu.json").read_text(encoding="utf-8"))["rows"]
    measured = {row["case"].removeprefix(f"{name}, "): row["sides"] for row in rows if row["case"].startswith(name)}
    as_it_is, captured = (_small(name, captures=captures).times for captures in (False, True))
    wanted_ms = measured["as it is"]["ours, without kernels"][0]
    assert 1e3 * as_it_is.step_s == pytest.approx(wanted_ms, rel=HOSTS_WITHIN)
    assert 1e3 * captured.step_s == pytest.approx(measured["captured, 10 in a row"]["ours"][0], rel=CAPTURED_WITHIN)
    assert captured.host == 0
    assert as_it_is.host > (0 if "2048" in name else as_it_is.step_s / 2)


@pytest.mark.parametrize("case", [case for case in CASES if HOST_BOUND in case.name], ids=lambda case: case.name)
def test_time_of_a_model_that_waits_for_the_host(case: Case) -> None:
    assert case.plan.times.host > case.plan.times.compute
    assert 1e3 * case.plan.times.step_s == pytest.approx(case.step_ms, rel=HOSTS_WITHIN)


def test_order_of_step_times() -> None:
    """Of any two runs of one job, where one takes at least a fiftieth longer, so does its estimate."""
    for job in {case.job for case in CASES}:
        runs = [case for case in CASES if case.job == job]
        for slow in runs:
            for fast in runs:
                if slow.step_ms > 1.02 * fast.step_ms:
                    assert slow.plan.times.step_s > fast.plan.times.step_s, (slow.name, fast.name)
