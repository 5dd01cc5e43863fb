"""Documents of many lengths in rows of one length, with what keeps them apart: ids, positions, targets.

A plan says which pieces of which documents stand in which row; it is computed from lengths alone. Rows go to attention
with `kernels.Documents(ids)`, so that no token sees another document's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from disttrain.errors import DataError

IGNORED_TARGET: Final = -100
"""The target that `torch.nn.functional.cross_entropy` and ours leave out by default."""


class Piece(NamedTuple):
    """`length` tokens of a document, from `start` on."""

    document: int
    start: int
    length: int


def pack(lengths: Sequence[int], row_size: int) -> list[list[Piece]]:
    """The pieces of each row: all tokens of all documents once, in as few rows as a simple rule finds.

    Long documents first, each into the row with the least room that is enough (best fit, decreasing); of equal ones the
    first. A document longer than a row is cut into pieces of a row, and a rest. Empty ones are left out.
    Raises: DataError for rows without tokens.
    """
    if row_size < 1:
        raise DataError("pack", f"row_size is {row_size}.", "Give 1 or more.")
    pieces = [
        Piece(document, start, min(row_size, length - start))
        for document, length in enumerate(lengths)
        for start in range(0, length, row_size)
    ]
    pieces.sort(key=lambda piece: -piece.length)
    rows: list[list[Piece]] = []
    rows_with_room: list[list[int]] = [[] for _ in range(row_size + 1)]
    # Bit r: there is a row with room for r tokens. The lowest one that is enough is found by arithmetic.
    rooms = 0
    for piece in pieces:
        enough = rooms >> piece.length
        if enough:
            room = piece.length + (enough & -enough).bit_length() - 1
            number = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, number = row_size, len(rows)
            rows.append([])
        rows[number].append(piece)
        if room > piece.length:
            rows_with_room[room - piece.length].append(number)
            rooms |= 1 << (room - piece.length)
    return rows


class PackedDocuments:
    """A dataset of rows of whole documents, by the plan of `pack`.

    A row is a dict of int64 tensors of (row_size,): `tokens`; `targets`, the next token of the same document, else
    -100, which losses leave out; `positions`, from 0 within each piece; `document_ids`, which grow along the row. What
    is left of a row has `pad` tokens, no targets, and an id of its own.

    Args:    documents  arrays, lists or tensors of tokens: a list, or `TokenArray.documents(end)`.
    Raises:  DataError for documents without a token in any.
    """

    def __init__(self, documents: Sequence[Any], row_size: int, *, pad: int = 0) -> None:
        self._documents = documents
        self._row_size, self._pad = row_size, pad
        lengths = getattr(documents, "lengths", None)
        self.plan = pack([len(document) for document in documents] if lengths is None else lengths, row_size)
        if not self.plan:
            problem = f"{len(documents)} documents have no tokens."
            raise DataError("PackedDocuments", problem, "Give documents with tokens in them.")

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = np.full(self._row_size, self._pad, np.int64)
        targets = np.full(self._row_size, IGNORED_TARGET, np.int64)
        positions = np.zeros(self._row_size, np.int64)
        ids = np.zeros(self._row_size, np.int64)
        at = 0
        for number, (document, start, length) in enumerate(self.plan[index]):
            # With the one after it, where the document goes on in another row.
            source = np.asarray(self._documents[document])[start : start + length + 1].astype(np.int64)
            row = slice(at, at + length)
            tokens[row] = source[:length]
            targets[at : at + len(source) - 1] = source[1:]
            positions[row] = np.arange(length)
            ids[row] = number
            at += length
        positions[at:] = np.arange(self._row_size - at)
        ids[at:] = len(self.plan[index])
        row_of = {"tokens": tokens, "targets": targets, "positions": positions, "document_ids": ids}
        return {name: torch.from_numpy(values) for name, values in row_of.items()}


def documents_of(tokens: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Document ids and positions of rows in which documents end with the token `end`, which belongs to them.

    Args:    tokens  (..., L), integers.
    Returns: ids (..., L), from 0 on, growing, and positions (..., L), from 0 in each document; int64, on its device.
    """
    begins = torch.zeros_like(tokens, dtype=torch.int64)
    begins[..., 1:] = tokens[..., :-1] == end
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    starts = torch.where(begins.bool(), places, 0).cummax(-1).values
    return begins.cumsum(-1), places - starts
