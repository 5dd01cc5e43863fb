"""The flagship example as its tests run it: a small model on a text that nobody edits, on ranks that are there."""

from __future__ import annotations

import csv
from pathlib import Path
from unittest import mock

import train_llama
from llama import flags as command_line
from llama import record

import disttrain

SIZES = "dim=32,num_layers=4,num_heads=8,num_kv_heads=4,hidden_size=64"
SMALL = ("--model", SIZES, "--seq", "16", "--batch", "16", "--lr", "0.01", "--seed", "1", "--dtype", "fp64")


def write_text(folder: Path) -> Path:
    """Files of square numbers."""
    folder.mkdir()
    for part in range(40):
        numbers = range(100 * part, 100 * part + 100)
        (folder / f"{part}.txt").write_text(" ".join(str(number * number) for number in numbers))
    return folder


def trained(arguments: list[str], num_evaluation_batches: int = 2) -> None:
    """Rank task: the example from its command line to its end, in the world that is there; but it draws no picture.

    For that a process loads a library for more seconds than it trains. Nor does it evaluate longer than it trains.
    """
    flags = command_line.parse(arguments, disttrain.get_world_size())
    flags.dtype = flags.dtype or "fp32"
    with (
        mock.patch.object(record, "draw"),
        mock.patch.object(train_llama, "NUM_EVALUATION_BATCHES", num_evaluation_batches),
    ):
        train_llama.train(flags, disttrain.current_world().device)


def losses(out: Path) -> dict[str, list[float]]:
    """All that the run in `out` has written, to the last digit."""
    with (out / "loss.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in ("loss", "held_out_loss")}
