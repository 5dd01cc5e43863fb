"""The order in which parameters are gathered, waited for, freed and reduced is the one that has been recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp2_commands.__main__ import GOLDEN, text_of
from tests.fsdp2_commands.record import Commands
from tests.fsdp2_commands.scenarios import SCENARIOS


def recorded() -> dict[str, str]:
    parts = GOLDEN.read_text().split("\n=== ")
    return {name: text.strip() for name, _, text in (part.partition("\n") for part in parts[1:])}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_is_done_is_done_in_the_same_order(scenario: Callable[[Commands], None]) -> None:
    assert text_of(scenario) == recorded()[scenario.__name__]
