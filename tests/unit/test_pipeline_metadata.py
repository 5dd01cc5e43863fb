"""The form of what one stage hands to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disttrain.pipelining.runtime.message_metadata import form_of, pack_form, unpack_form


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
    form, tensors = form_of(value)
    arrived = unpack_form(pack_form(form))
    assert arrived == form
    torch.testing.assert_close(arrived.build(tensors), value)


def test_a_value_like_the_one_before_has_the_same_form() -> None:
    known, _ = form_of(torch.ones(2, 3))
    for value, is_alike in [
        (torch.zeros(2, 3), True),
        (torch.ones(3, 2), False),
        (torch.ones(2, 3, dtype=torch.float64), False),
        (torch.ones(2, 3, requires_grad=True), False),
        ((torch.ones(2, 3),), False),
        (5, False),
    ]:
        form, _ = form_of(value, known)
        assert (form is known) == is_alike
        assert form == form_of(value)[0]
    number, _ = form_of(5)
    assert form_of(6, number)[0] != number
