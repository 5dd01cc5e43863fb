"""The metadata of what one stage hands to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disttrain.pipelining.runtime.message_metadata import metadata_of, pack_metadata, unpack_metadata


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3),
        torch.ones(2, requires_grad=True),
        (torch.ones(2), {"mask": torch.ones(1, dtype=torch.bool), "scale": 3}),
        [torch.ones(1)],
        7,
    ],
    ids=["tensor", "trained tensor", "nest", "list of one", "number"],
)
def test_a_value_is_built_again_from_its_form_as_it_travels(value: Any) -> None:
    metadata, tensors = metadata_of(value)
    arrived = unpack_metadata(pack_metadata(metadata))
    assert arrived == metadata
    torch.testing.assert_close(arrived.build(tensors), value)


def test_a_value_like_the_one_before_has_the_same_form() -> None:
    known, _ = metadata_of(torch.ones(2, 3))
    for value, is_alike in [
        (torch.zeros(2, 3), True),
        (torch.ones(3, 2), False),
        (torch.ones(2, 3, dtype=torch.float64), False),
        (torch.ones(2, 3, requires_grad=True), False),
        ((torch.ones(2, 3),), False),
        (5, False),
    ]:
        metadata, _ = metadata_of(value, known)
        assert (metadata is known) == is_alike
        assert metadata == metadata_of(value)[0]
    number, _ = metadata_of(5)
    assert metadata_of(6, number)[0] != number
