"""Documents in rows of one length: all tokens once, each apart from its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from disttrain import kernels
from disttrain.data import Loader, PackedDocuments, Piece, TokenArray, documents_of, pack
from disttrain.errors import DataError


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 16))
def test_a_plan_has_every_token_once_in_rows_that_hold_them(lengths: list[int], row_size: int) -> None:
    rows = pack(lengths, row_size)
    tokens = [
        (piece.document, place)
        for row in rows
        for piece in row
        for place in range(piece.start, piece.start + piece.length)
    ]
    assert sorted(tokens) == [(document, place) for document, size in enumerate(lengths) for place in range(size)]
    filled = [sum(piece.length for piece in row) for row in rows]
    assert all(0 < size <= row_size for size in filled)
    # No two rows could be one.
    assert sum(2 * size <= row_size for size in filled) <= 1


def test_a_document_goes_where_it_leaves_the_least_room() -> None:
    assert pack([3, 5, 8, 2, 19], 8) == [
        [Piece(2, 0, 8)],
        [Piece(4, 0, 8)],
        [Piece(4, 8, 8)],
        [Piece(1, 0, 5), Piece(0, 0, 3)],
        [Piece(4, 16, 3), Piece(3, 0, 2)],
    ]


def test_a_row_says_what_belongs_together() -> None:
    packed = PackedDocuments([[1, 2, 3], np.array([4, 5]), torch.tensor([6, 7, 8, 9, 10, 11])], 6, pad=99)
    rows = [{name: values.tolist() for name, values in packed[number].items()} for number in range(len(packed))]
    assert rows == [
        {
            "tokens": [6, 7, 8, 9, 10, 11],
            "targets": [7, 8, 9, 10, 11, -100],
            "positions": [0, 1, 2, 3, 4, 5],
            "document_ids": [0] * 6,
        },
        {
            "tokens": [1, 2, 3, 4, 5, 99],
            "targets": [2, 3, -100, 5, -100, -100],
            "positions": [0, 1, 2, 0, 1, 0],
            "document_ids": [0, 0, 0, 1, 1, 2],
        },
    ]


def test_a_document_that_is_cut_keeps_its_targets() -> None:
    packed = PackedDocuments([list(range(1, 8))], 4)
    assert packed[0]["targets"].tolist() == [2, 3, 4, 5]
    assert packed[1]["tokens"].tolist() == [5, 6, 7, 0]
    assert packed[1]["targets"].tolist() == [6, 7, -100, -100]


def test_what_has_no_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="2 documents have no tokens"):
        PackedDocuments([[], []], 4)
    with pytest.raises(DataError, match="row_size is 0"):
        pack([1], 0)


def test_ids_and_positions_of_rows_with_ends() -> None:
    ids, positions = documents_of(torch.tensor([[5, 0, 6, 7, 0, 0, 8], [1, 2, 3, 4, 5, 6, 0]]), end=0)
    assert ids.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0] * 7]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6]]


class Attending(nn.Module):
    """One layer of attention over tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(12, 8), nn.Embedding(16, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        query, key, value = self.qkv(hidden).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        rule = kernels.Causal() & kernels.Documents(ids)
        seen = kernels.attention(query, key, value, rule)
        return self.out(seen.transpose(1, 2).flatten(-2))


def test_packed_documents_train_as_each_by_itself() -> None:
    """The sum of losses and its gradients, in fp64."""
    torch.manual_seed(0)
    model = Attending().double()
    texts = [torch.randint(1, 12, (size,)).tolist() for size in (3, 9, 1, 5, 16, 2, 7)]
    whole = TokenArray([np.concatenate([[*text, 0] for text in texts]).astype(np.uint8)])
    packed = PackedDocuments(whole.documents(0), 17)
    (batch,) = Loader(packed, len(packed), replica=0, num_replicas=1)
    logits = model(batch["tokens"], batch["positions"].clamp(max=15), batch["document_ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    gradients = torch.autograd.grad(loss, list(model.parameters()))

    def alone(text: list[int]) -> torch.Tensor:
        tokens = torch.tensor([[*text, 0]])
        places = torch.arange(tokens.shape[1]).clamp(max=15)[None]
        logits = model(tokens, places, torch.zeros_like(tokens))
        return F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")

    expected = torch.stack([alone(text) for text in texts]).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected, list(model.parameters())), rtol=1e-9, atol=1e-12
    )
