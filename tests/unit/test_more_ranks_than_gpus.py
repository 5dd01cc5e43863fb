"""Where ranks are more than GPUs, which GPU a rank takes, and what NCCL is told."""

from __future__ import annotations

import os

import pytest
import torch

from disttrain.testing.rank_worker import _take_gpu
from tests.flight_corpus.cases import CASES
from tests.flight_corpus.make import gpu_of

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(("rank", "gpu", "host"), [(0, 0, None), (1, 1, None), (2, 0, "host-1"), (5, 1, "host-2")])
def test_ranks_of_one_gpu_are_of_different_hosts(
    monkeypatch: pytest.MonkeyPatch, rank: int, gpu: int, host: str | None
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(os, "environ", {})
    _take_gpu(rank)
    assert taken == [gpu]
    assert os.environ.get("NCCL_HOSTID") == host


@pytest.mark.parametrize(
    ("name", "num_gpus", "gpus"),
    [
        ("nccl_slow_kernels", 4, [0, 1, 2]),
        ("nccl_slow_kernels", 2, [0, 0, 1]),
        ("nccl_kernel_that_does_not_end_before_a_message", 2, [1, 0, 0]),
        ("nccl_mesh_rank_stopped", 3, [0, 1, 0, 2]),
        ("nccl_signalled_while_it_trains", 2, [0, 1, 0]),
        ("nccl_slow_data", 1, [0, 0, 0]),
    ],
)
def test_who_is_to_blame_has_a_gpu_alone(name: str, num_gpus: int, gpus: list[int]) -> None:
    case = BY_NAME[name]
    assert [gpu_of(case, rank, num_gpus) for rank in range(case.num_ranks)] == gpus
