"""Copies bytes that were read into tensors: any part of any block, to any position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from disttrain.checkpoint.format.box import Box, boxes_of_range
from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.loading.fetches import Fetch, Piece

_PARALLEL_ELEMENTS = 1 << 15

Targets: TypeAlias = Mapping[str, Mapping[Box, torch.Tensor]]
"""Local tensors, by name and by where in the whole they lie."""


def scatter(fetch: Fetch, data: memoryview, targets: Targets) -> None:
    """Copy what was fetched to where it is wanted. `data` may be used again on return; any thread may call it."""
    whole = torch.frombuffer(data, dtype=torch.uint8)
    # Also in threads: parameters take no part in autograd here, and targets may have been made in inference mode.
    with torch.inference_mode():
        for piece in fetch.pieces:
            begin = piece.offset - fetch.start
            _scatter_piece(piece, whole[begin : begin + piece.stop - piece.start], targets)


def _scatter_piece(piece: Piece, data: torch.Tensor, targets: Targets) -> None:
    chunk, dtype = piece.chunk, dtype_named(piece.reads[0].dtype)
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:  # some formats align nothing
        data = data.clone()
    elements = data.view(dtype)
    is_whole = elements.numel() == chunk.box.num_elements
    for read in piece.reads:
        local = targets[read.name][read.wanted]
        if is_whole and read.box == read.wanted == chunk.box:
            _copy(local, elements.view(chunk.box.shape))
            continue
        first, at = piece.start // dtype.itemsize, 0
        for run in boxes_of_range(chunk.box.shape, first, first + elements.numel()):
            box = run.moved_by(chunk.box.origin)
            values = elements[at : at + box.num_elements].view(box.shape)
            at += box.num_elements
            part = box.intersection(read.box)
            if part is not None:
                target = local[part.seen_from(read.wanted.origin).slices()]
                _copy(target, values[part.seen_from(box.origin).slices()])


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    is_plain = target.is_cpu and target.dtype == source.dtype and not target.is_conj() and not target.is_neg()
    if source.numel() >= _PARALLEL_ELEMENTS and is_plain and target.is_contiguous() and source.is_contiguous():
        # torch would use several threads for each reading thread, and all would compete.
        np.copyto(_bytes_of(target), _bytes_of(source))
    else:
        target.copy_(source)


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(-1).view(torch.uint8).numpy()
