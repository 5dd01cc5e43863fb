"""Computes what a rank's queries see of some keys, piece by piece, each by the fastest kernel that takes it."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import torch

from disttrain.kernels.attention.context.blocks import bands, dense, placed
from disttrain.kernels.attention.context.blocks.dense import Places
from disttrain.kernels.attention.context.blocks.pieces import Piece
from disttrain.kernels.attention.context.parts import positions_of
from disttrain.kernels.attention.context.sums.joined import Joined
from disttrain.kernels.attention.context.sums.sums import Sums, part_of
from disttrain.kernels.attention.rules import Rule, changes_of

_MOST_PIECES: Final = 16
"""More than these for one set of keys take longer to launch than one kernel that asks the rule at each place."""


class Task:
    """The queries of a rank, some keys at hand, by their positions, and the rule between them.

    Args: rule  with its tensors on the device of the queries.
    """

    def __init__(
        self,
        rule: Rule | None,
        queries: tuple[range, ...],
        keys: tuple[range, ...],
        pieces: tuple[Piece, ...],
        scale: float,
        device: torch.device,
        by: str | None,
    ) -> None:
        self._all_pieces = pieces
        self._rule = rule
        self._ranges = queries, keys
        self._scale = scale
        self._device = device
        self._by = by
        self._is_changed = bool(changes_of(rule))

    @cached_property
    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = (positions_of(ranges, self._device) for ranges in self._ranges)
        return queries, keys

    def forward(self, joined: Joined, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Adds what the queries see of these keys to what they have seen."""
        for piece in self._pieces(query, key, value):
            inputs = part_of(query, piece.queries), part_of(key, piece.keys), part_of(value, piece.keys)
            kernel = self._kernel_of(piece, *inputs)
            if kernel and piece.band is not None:
                result = bands.forward(kernel, piece.band, *inputs, self._scale)
            else:
                places = self._places(piece)
                forward = placed.forward if self._is_placed(*inputs) else dense.forward
                result = forward(*inputs, places)
            joined.add(piece.queries, *result)

    def backward(
        self,
        sums: tuple[Sums, Sums, Sums],
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Adds to the gradients of query, key and value."""
        for piece in self._pieces(query, key, value):
            own_query, own_key, own_value = inputs = (
                part_of(query, piece.queries),
                part_of(key, piece.keys),
                part_of(value, piece.keys),
            )
            results = part_of(out, piece.queries), part_of(lse, piece.queries)
            own_grad_out = part_of(grad_out, piece.queries)
            kernel = self._kernel_of(piece, own_query, own_key, own_value)
            if kernel and piece.band is not None:
                grads = bands.backward(kernel, piece.band, own_grad_out, *inputs, *results, self._scale)
            else:
                places = self._places(piece)
                backward = placed.backward if self._is_placed(*inputs) else dense.backward
                grads = backward(own_grad_out, *inputs, *results, places)
            for total, run, grad in zip(sums, (piece.queries, piece.keys, piece.keys), grads, strict=True):
                total.add(run, grad)

    def _pieces(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Piece, ...]:
        """All pieces; or one, where the rule is asked in each, or they are so many that one kernel is faster."""
        is_one = self._is_changed or len(self._all_pieces) > _MOST_PIECES
        if is_one and self._is_placed(query, key, value):
            return (Piece(range(query.shape[2]), range(key.shape[2]), None),)
        return self._all_pieces

    def _is_placed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        return self._by is None and placed.serves(query, key, value)

    def _kernel_of(self, piece: Piece, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
        if piece.band is None or self._is_changed or self._by is not None:
            return ""
        return bands.kernel_for(piece.band, query, key, value)

    def _places(self, piece: Piece) -> Places:
        queries, keys = self._positions
        # The rule is asked at each place, even where all is seen: its changes of scores are everywhere.
        return Places(
            self._rule,
            queries[piece.queries.start : piece.queries.stop],
            keys[piece.keys.start : piece.keys.stop],
            self._scale,
        )
