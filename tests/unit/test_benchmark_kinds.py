"""Where a step's time goes, as the benchmark of whole models tells it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kinds() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("models.kinds")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", "matmul"),
        ("_update", "optimizer"),
        ("cunn_SoftMaxForward", "loss"),
        ("_norm_backward", "kernels of blocks"),
        ("triton_poi_fused_mul_silu_5", "Inductor's"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("embedding_dense", "other"),
    ],
)
def test_kernels_are_told_by_their_names(kinds: ModuleType, name: str, kind: str) -> None:
    assert kinds.kind_of(name) == kind


def test_what_is_exposed_and_what_is_idle(kinds: ModuleType) -> None:
    """A product for 4 ms, a gather beside its last one and 2 more, nothing for 1, a copy."""
    spans = [
        kinds.Span("nvjet", 0.0, 4000.0),
        kinds.Span("nccl", 3000.0, 6000.0),
        kinds.Span("memcpy", 7000.0, 7500.0),
    ]
    found = kinds.times_by_kind(reversed(spans))
    assert found == {
        "matmul": 4.0,
        "communication": 3.0,
        "copies and casts": 0.5,
        "exposed communication": 2.0,
        "idle": 1.0,
        "step": 7.5,
    }
    assert kinds.longest(spans, 1) == [("nvjet", 4.0, 1)]
