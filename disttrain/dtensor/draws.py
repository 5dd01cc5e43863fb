"""Random numbers that don't depend on the layout: every rank draws the whole and keeps its part.

On a CPU torch draws one element after the other (normal ones in blocks of 16, the last of which reaches back), so the
whole need not be in memory at once. On a GPU the numbers depend on how the kernel was launched, so it must be.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.spec.layout import Spec

BLOCK_SIZE = 16
CHUNK_SIZE = 1 << 20
"""Elements drawn at once, where not all must be."""

Fill = Callable[[torch.Tensor], object]


def draw_part(fill: Fill, spec: Spec, device: torch.device, chunk_size: int = CHUNK_SIZE) -> torch.Tensor:
    """This rank's part of a tensor that `fill`, one of torch's in-place random operators, has filled.

    All ranks must have the same random state, and have the same one afterwards.
    """
    rows = _rows_at_once(spec.shape, chunk_size)
    if rows is None or device.type != "cpu" or not _is_box(spec):
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        fill(whole)
        return redistribute_local(whole, spec.with_layout(spec.layout.replicated()), spec.layout)
    part = torch.empty(spec.local_shape, dtype=spec.dtype, device=device)
    _draw_by_rows(fill, spec, part, rows)
    return part


def _is_box(spec: Spec) -> bool:
    return all(placement.is_replicate() or placement.is_shard() for placement in spec.placements)


def _rows_at_once(shape: tuple[int, ...], chunk_size: int) -> int | None:
    """Rows that make about `chunk_size` elements, and whole blocks; None where that is all of them."""
    if not shape or 0 in shape:
        return None
    row_size = torch.Size(shape[1:]).numel()
    rows = -(-max(chunk_size // row_size, 1) // BLOCK_SIZE) * BLOCK_SIZE
    return rows if rows < shape[0] else None


def _draw_by_rows(fill: Fill, spec: Spec, part: torch.Tensor, rows: int) -> None:
    num_rows, first = spec.shape[0], 0
    sizes, offsets = spec.local_shape, spec.local_offset
    while first < num_rows:
        # What is left goes along where it would make no block of its own.
        stop = first + rows if num_rows - first - rows >= BLOCK_SIZE else num_rows
        chunk = torch.empty((stop - first, *spec.shape[1:]), dtype=spec.dtype, device=part.device)
        fill(chunk)
        begin, end = max(first, offsets[0]), min(stop, offsets[0] + sizes[0])
        if begin < end:
            rows_of_part = chunk[begin - first : end - first]
            for dim in range(1, len(sizes)):
                rows_of_part = rows_of_part.narrow(dim, offsets[dim], sizes[dim])
            part[begin - offsets[0] : end - offsets[0]] = rows_of_part
        first = stop
