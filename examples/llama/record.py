"""What a run leaves in its folder beside the checkpoints: the losses as a table and as a picture."""

from __future__ import annotations

import csv
import os
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Row:
    """After `step` steps: the loss of the next step's batch, and that of the held-out text where it was computed."""

    step: int
    loss: float | None
    held_out_loss: float | None


class Record:
    """The rows of a run, each written to `folder`/loss.csv at once, so that a run that is killed leaves them too.

    Leaving its `with` block draws `folder`/loss.png, where each point is a mean of `num_batches` batches. Without a
    folder nothing is written.
    """

    def __init__(self, folder: Path | None, title: str, first_step: int, num_batches: int) -> None:
        self.folder = folder
        self._title, self._num_batches = title, num_batches
        table = Path(os.devnull) if folder is None else folder / "loss.csv"
        # A run that is resumed goes back to its checkpoint: what came after will be done again.
        self.rows = [row for row in _read(table) if row.step < first_step]
        self._file = table.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow([field.name for field in fields(Row)])
        self._writer.writerows(astuple(row) for row in self.rows)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._writer.writerow(astuple(row))
        self._file.flush()

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss of its batch)."""
        return [(row.step, row.loss) for row in self.rows if row.loss is not None]

    def held_out_losses(self) -> list[tuple[int, float]]:
        """(step, loss) wherever it was computed."""
        return [(row.step, row.held_out_loss) for row in self.rows if row.held_out_loss is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self.folder is not None:
            draw(self.folder / "loss.png", self._title, self.losses(), self.held_out_losses(), self._num_batches)


def _read(table: Path) -> list[Row]:
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        return [
            Row(int(row["step"]), _number(row["loss"]), _number(row["held_out_loss"])) for row in csv.DictReader(file)
        ]


def _number(text: str) -> float | None:
    return float(text) if text else None


def means_of_last(losses: list[float], num_batches: int) -> list[float]:
    """After each batch, the mean of the last ones."""
    firsts = (max(end - num_batches, 0) for end in range(1, len(losses) + 1))
    return [sum(losses[first:end]) / (end - first) for end, first in enumerate(firsts, start=1)]


def draw(
    path: Path, title: str, training: list[tuple[int, float]], held_out: list[tuple[int, float]], num_batches: int
) -> None:
    """Both losses over steps, as PNG, each the mean of so many batches."""
    from matplotlib.figure import Figure  # takes seconds to load, and one rank draws
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if training:
        steps, losses = [step for step, _ in training], [loss for _, loss in training]
        axes.plot(steps, losses, color="#9db8d9", linewidth=0.8, label="each batch")
        axes.plot(
            steps,
            means_of_last(losses, num_batches),
            color="#1f5fa8",
            linewidth=1.8,
            label=f"training, mean of {num_batches} batches",
        )
    if held_out:
        steps, losses = [step for step, _ in held_out], [loss for _, loss in held_out]
        label = f"held-out files, mean of {num_batches} batches"
        axes.plot(steps, losses, color="#d1495b", linewidth=1.2, marker="o", markersize=5, label=label)
        axes.annotate(
            f"{losses[-1]:.2f}",
            (steps[-1], losses[-1]),
            (0, 8),
            textcoords="offset points",
            ha="right",
            color="#d1495b",
        )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("loss (nats per token)")
    axes.set_ylim(bottom=0)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
