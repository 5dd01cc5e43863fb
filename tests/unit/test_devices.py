"""What this node has, as the launcher and the doctor count it."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain.devices import num_gpus


def devices(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "num_visible"),
    [(None, 2), ("", 0), ("0", 1), ("1,0", 2), ("0,-1,1", 1), ("0,7", 1), ("GPU-8d3f,MIG-77a1", 2), ("-1", 0)],
)
def test_gpus_are_counted_as_the_runtime_counts(tmp_path: Path, visible: str | None, num_visible: int) -> None:
    folder = devices(tmp_path, "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")
    environ = {"PATH": ""} if visible is None else {"PATH": "", "CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(environ, folder) == num_visible


def test_without_devices_or_driver_there_is_no_gpu(tmp_path: Path) -> None:
    assert num_gpus({"PATH": "", "CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0
