"""A plan as people read it: which module is cut how, and what a step sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from disttrain.dtensor import Shard
from disttrain.tp.attributes import DivideAttributes
from disttrain.tp.heads import HeadParallel, Together
from disttrain.tp.layers.linears import matrix_of
from disttrain.tp.prepare import PrepareModuleInput
from disttrain.tp.styles import ColwiseParallel, ParallelStyle, RowwiseParallel


@dataclass(frozen=True)
class Entry:
    """One line of a plan. `module` is the first of `count` that it is for; `is_shared`: its input is gathered by the
    module that holds it."""

    name: str
    style: ParallelStyle
    module: nn.Module
    dim: int
    is_shared: bool = False
    count: int = 1


class ParallelPlan(dict[str, ParallelStyle]):
    """Styles by module name, for parallelize_module. Entries are changed as of any dict; `print` shows a table."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = {entry.name: entry for entry in entries}
        super().__init__({name: entry.style for name, entry in self._entries.items()})

    def __str__(self) -> str:
        return self.table()

    def wire_bytes(self, num_ranks: int, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bytes that one rank sends in a step of forward and backward over `num_tokens` tokens, activations in `dtype`.

        Of entries that plan_for has made, not of those added by hand; without the gradients of parameters that all
        ranks hold, such as norms'.
        """
        sent = (self._sent(entry, num_ranks, num_tokens, dtype) for entry in self._known())
        return sum([forward + backward for forward, backward in sent])

    def table(
        self, num_ranks: int | None = None, num_tokens: int | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> str:
        """Module, how many there are, how it is cut; what a rank sends, where ranks and tokens of a step are given."""
        if num_ranks is None or num_tokens is None:
            return _aligned([["module", "count", "cut"], *(self._row(name) for name in self)])
        total = self.wire_bytes(num_ranks, num_tokens, dtype)
        scale, unit = (1e6, "MB") if total >= 1e7 else (1e3, "KB")
        rows = [["module", "count", "cut", f"forward {unit}", f"backward {unit}"]]
        sent_by_name = {entry.name: self._sent(entry, num_ranks, num_tokens, dtype) for entry in self._known()}
        for name in self:
            sent = (
                [f"{value / scale:.1f}" if value else "" for value in sent_by_name[name]]
                if name in sent_by_name
                else ["?", "?"]
            )
            rows.append(self._row(name) + sent)
        text = _aligned(rows)
        text += f"\na rank of {num_ranks} sends {total / scale:.1f} {unit} in a step of {num_tokens} tokens ({dtype})"
        return text

    def _row(self, name: str) -> list[str]:
        entry = self._entries.get(name)
        return [name or "(the model)", str(entry.count) if entry else "", _described(self[name])]

    def _known(self) -> Iterable[Entry]:
        """Entries that are still as they were made."""
        return (entry for name, entry in self._entries.items() if self.get(name) is entry.style)

    def _sent(self, entry: Entry, num_ranks: int, num_tokens: int, dtype: torch.dtype) -> tuple[float, float]:
        """Bytes that a rank sends for all modules of an entry, forward and backward.

        A gather or a reduce-scatter of n bytes sends (ranks - 1) / ranks * n, an all-reduce twice that.
        """
        share = (num_ranks - 1) / num_ranks * num_tokens * dtype.itemsize * entry.count
        style = entry.style
        if isinstance(style, Together):
            parts = [dataclasses.replace(entry, style=part) for part in style.styles]
            sent = [self._sent(part, num_ranks, num_tokens, dtype) for part in parts]
            return sum(forward for forward, _ in sent), sum(backward for _, backward in sent)
        if isinstance(style, PrepareModuleInput):
            return share * entry.dim, share * entry.dim
        if isinstance(style, RowwiseParallel):
            if isinstance(style.output_layouts, Shard):
                return share * entry.dim, share * entry.dim
            return 2 * share * entry.dim, 0.0
        if isinstance(style, ColwiseParallel) and not entry.is_shared:
            gathers = isinstance(style.input_layouts, Shard)
            forward, backward = (share * entry.dim,) * 2 if gathers else (0.0, 2 * share * entry.dim)
            if style.output_layouts is not None:
                forward += share * _num_outputs(entry.module)
            return forward, backward
        if (crossings := getattr(style, "crossings", None)) is not None:
            return share * entry.dim * crossings[0], share * entry.dim * crossings[1]
        return 0.0, 0.0


def _num_outputs(module: nn.Module) -> int:
    matrix = matrix_of(module)
    weight: Any = module.weight
    return int(weight.shape[0 if matrix is None else matrix.out_dim])


def _described(style: ParallelStyle) -> str:
    """The style and what is not its default."""
    if isinstance(style, Together):
        return "; ".join(map(_described, style.styles))
    if isinstance(style, HeadParallel):
        return f"heads of {', '.join(style.dims)}"
    if isinstance(style, PrepareModuleInput):
        return f"input {style.input_layouts} -> {style.desired_input_layouts}"
    if isinstance(style, DivideAttributes):
        each = "" if style.num_kv_heads is None else " of one head"
        return f"{', '.join(style.names)} / ranks{each}"
    shown = {
        "input_layouts": "input {}",
        "output_layouts": "output {}",
        "head_dim": "heads of {}",
        "num_blocks": "{} blocks",
        "sequence_dim": "dim {}",
        "cuts_tokens": "tokens cut",
    }
    values = vars(style)
    parts = [
        text.format(values[name])
        for name, text in shown.items()
        if values.get(name) is not None and values[name] is not False and (name, values[name]) != ("num_blocks", 1)
    ]
    kind = type(style).__name__.removesuffix("Parallel").lower()
    return ", ".join([_KINDS.get(kind, kind), *parts])


_KINDS: Final = {
    "colwise": "columns",
    "rowwise": "rows",
    "experttensor": "each expert's hidden dim",
    "replicated": "whole, on its own tokens",
}
"""Styles in few words."""


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numbers = {column for column, title in enumerate(rows[0]) if title == "count" or title.endswith((" KB", " MB"))}
    lines = [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
