"""Runs in TensorBoard, Weights & Biases (offline) and MLflow, as their own readers show them, of two ranks' reports."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import disttrain
from disttrain.errors import SettingError
from disttrain.testing import RankPool
from disttrain.trackers import MLflow, TensorBoard, WandB, track

# What these libraries do to Python's own, and leave open, is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def _train(folder: str, kind: str, first_step: int, num_steps: int) -> list[str]:
    """Reports of two ranks. Returns: the modules of trackers that this rank has loaded."""
    import sys  # here, as the rest of this function: ranks run it

    os.environ |= {"WANDB_SILENT": "true", "WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
    rank = disttrain.get_rank()
    trackers: dict[str, Any] = {
        "tensorboard": lambda: TensorBoard(Path(folder) / "board"),
        "wandb": lambda: WandB(project="llama", dir=folder),
        "mlflow": lambda: MLflow("llama", tracking_uri=f"file:{folder}/mlruns"),
    }
    with track(trackers[kind](), folder=Path(folder) / "checkpoints", first_step=first_step, config={"lr": 0.1}):
        for step in range(first_step, num_steps):
            disttrain.report(step=step, loss=float(step + rank), tokens_per_s=100.0)
    return sorted(sys.modules.keys() & {"wandb", "mlflow", "tensorboardX"})


def _run_twice(rank_pool: RankPool, folder: Path, kind: str) -> str:
    """Trains for 4 steps, goes back to a checkpoint after 2, and trains until 5. Returns: the run's id."""
    os.makedirs(folder, exist_ok=True)
    for first_step, num_steps in ((0, 4), (2, 5)):
        arguments = {"folder": str(folder), "kind": kind, "first_step": first_step, "num_steps": num_steps}
        loaded = rank_pool.run(2, _train, arguments)
        assert loaded[1] == []  # rank 0 alone writes
    ids: dict[str, str] = json.loads((folder / "checkpoints" / "trackers.json").read_text())
    return ids[kind]


LOSSES = {step: step + 0.5 for step in range(5)}
"""The means of both ranks; rates add up to 200."""


def test_tensorboard(rank_pool: RankPool, tmp_path: Path) -> None:
    _run_twice(rank_pool, tmp_path, "tensorboard")
    from tensorboardX.proto.event_pb2 import Event  # here, as others: it takes seconds

    losses: dict[int, float] = {}
    for file in sorted((tmp_path / "board").iterdir()):
        for event in map(Event.FromString, _records_of_tensorflow(file.read_bytes())):
            if event.session_log.status:  # begins again, at this step: what is there from it on is hidden
                losses = {step: loss for step, loss in losses.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == "loss":
                    losses[event.step] = value.simple_value
                assert value.tag != "tokens_per_s" or value.simple_value == 200
    assert losses == LOSSES


def _records_of_tensorflow(data: bytes) -> Iterator[bytes]:
    """TFRecord: a length of 8 bytes and its CRC, the record and its CRC."""
    while data:
        (size,) = struct.unpack_from("<Q", data)
        yield data[12 : 12 + size]
        data = data[16 + size :]


def test_mlflow(rank_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = _run_twice(rank_pool, tmp_path, "mlflow")
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("llama").experiment_id])
    assert (run.info.run_id, run.info.status, run.data.params) == (run_id, "FINISHED", {"lr": "0.1"})
    losses = {metric.step: metric.value for metric in client.get_metric_history(run_id, "loss")}
    assert losses == LOSSES
    assert {metric.value for metric in client.get_metric_history(run_id, "tokens_per_s")} == {200.0}


def test_a_folder_that_mlflow_refuses_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    tracker = MLflow("llama", tracking_uri=f"file:{tmp_path}/mlruns")
    said = r"MLflow: it writes to no folders, and tracking_uri is file:.*mlruns\. .*set MLFLOW_ALLOW_FILE_STORE=true"
    with pytest.raises(SettingError, match=said):
        tracker.open(None, 0, {})


def test_weights_and_biases_offline(rank_pool: RankPool, tmp_path: Path) -> None:
    run_id = _run_twice(rank_pool, tmp_path, "wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    assert [file.stem for file in files] == [f"run-{run_id}"] * 2
    losses: dict[int, float] = {}
    for file in files:
        for record in map(Record.FromString, _records_of_leveldb(file.read_bytes())):
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if "loss" in values:
                losses[values["step"]] = values["loss"]
                assert values["tokens_per_s"] == 200.0
    assert losses == LOSSES


def _records_of_leveldb(data: bytes) -> Iterator[bytes]:
    """wandb's file: seven bytes, then LevelDB's log format, of blocks with records in up to several parts each."""
    record, offset = b"", 7
    while offset + 7 <= len(data):
        left = 32768 - offset % 32768
        if left < 7:
            offset += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, offset)
        record += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
