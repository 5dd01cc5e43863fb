"""How evenly tokens meet experts: what a run shows, and writes to a table, of the tokens that each expert had."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from torch import nn

import disttrain
from disttrain.experts import Router, RouterStatistics, read_statistics

TABLE = "experts.csv"


class Loads:
    """Tokens of each expert in each step, over all rows of the batch; of a model without experts there are none.

    `folder`/experts.csv gets a line for each layer and step: each expert's tokens over the mean. Without a folder
    nothing is written. In a pipeline they are those of this rank's stages.
    """

    def __init__(self, model: nn.Module, axis: disttrain.DeviceMesh, folder: Path | None, first_step: int) -> None:
        self._model, self._axis = model, axis
        self._has_experts = any(isinstance(module, Router) for module in model.modules())
        path = Path(os.devnull) if folder is None or not self._has_experts else folder / TABLE
        # A run that is resumed goes back to its checkpoint, as its losses do.
        kept = [row for row in _read(path) if int(row[0]) < first_step]
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerows(kept)
        self.last: Mapping[str, RouterStatistics] = {}

    def read(self, step: int) -> Mapping[str, RouterStatistics]:
        """What the routers did since the last reading, which was before `step`. Collective where there are experts."""
        if self._has_experts:
            self.last = read_statistics(self._model, self._axis)
            for name, layer in self.last.items():
                mean = sum(layer.tokens_per_expert) / len(layer.tokens_per_expert) or 1.0
                self._writer.writerow(
                    [step, block_of(name), *(f"{tokens / mean:.4f}" for tokens in layer.tokens_per_expert)]
                )
            self._file.flush()
        return self.last

    @property
    def worst(self) -> float | None:
        """Tokens of the busiest expert over the mean, in the layer where that is most; None without experts."""
        return max((layer.max_load for layer in self.last.values()), default=None)

    @property
    def words(self) -> str:
        """Of the layer with the busiest expert: how many tokens experts had in the last step."""
        if not self.last:
            return ""
        name, layer = max(self.last.items(), key=lambda item: item[1].max_load)
        tokens = layer.tokens_per_expert
        return f"tokens per expert {min(tokens)} to {max(tokens)}, max/mean {layer.max_load:.2f} ({block_of(name)})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def block_of(router: str) -> str:
    """The name of the block in which a router is."""
    return ".".join(router.split(".")[:2])


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Lets routers count no tokens meanwhile, nor take losses of them."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.eval()
    yield
    for router in routers:
        router.train()


def _read(path: Path) -> list[list[str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.reader(file) if row]
