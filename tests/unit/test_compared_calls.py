"""What ranks say of calls that don't fit, and the setting that makes them compare."""

from __future__ import annotations

import pytest
import torch

import disttrain
from disttrain.errors import CollectiveMismatchError, SettingError
from disttrain.process_group.watching.fingerprint import fields_of, find_mismatch
from disttrain.store import HashStore
from disttrain.testing import run_threads


def test_equal_calls_fit() -> None:
    call = fields_of(
        "all_reduce", (torch.ones(2), disttrain.ReduceOp.SUM, False), [torch.ones(2)], [torch.ones(2)], None
    )
    assert call["reduction"] == "SUM"
    assert call["sizes"] == [[2]]
    assert find_mismatch({4: call, 7: dict(call)}) == ""


def test_every_field_that_differs_is_named_with_its_ranks() -> None:
    def call(size: int, root: int) -> dict[str, object]:
        return fields_of("broadcast", (), [torch.ones(size)], [], root)

    text = find_mismatch({1: call(2, 0), 5: call(3, 1), 9: call(2, 0)})
    assert text == "root: 0 on ranks 1,9, 1 on rank 5; sizes: [[2]] on ranks 1,9, [[3]] on rank 5"


def test_the_setting_makes_ranks_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        disttrain.all_reduce(torch.ones(2))
        disttrain.all_reduce(torch.ones(2 + disttrain.get_rank()))

    monkeypatch.setenv("DISTTRAIN_DEBUG", "detail")
    with pytest.raises(CollectiveMismatchError, match=r"sizes: \[\[2\]\] on rank 0, \[\[3\]\] on rank 1.*sequence 2\]"):
        run_threads(2, body)
    monkeypatch.setenv("DISTTRAIN_DEBUG", "loud")
    with pytest.raises(SettingError, match="it must be off, info or detail"):
        disttrain.World(HashStore(), 0, 1, backend="fake", timeout_s=1)
