"""Environment variables, durations, and the form of an error."""

from __future__ import annotations

from datetime import timedelta

import pytest

from disttrain import settings
from disttrain.errors import DisttrainError, SettingError, ShapeError, StoreTimeoutError
from disttrain.store.durations import seconds


def test_a_setting_has_a_type_and_a_default() -> None:
    assert settings.RANK.read({"RANK": "3"}) == 3
    assert settings.RANK.read({"RANK": ""}) is None
    assert settings.TIMEOUT_S.read({}) == 600.0
    assert settings.MASTER_ADDR.is_set({"MASTER_ADDR": "x"})


@pytest.mark.parametrize(("setting", "text"), [(settings.RANK, "-1"), (settings.RANK, "x"), (settings.TIMEOUT_S, "0")])
def test_a_value_without_sense_names_the_variable(setting: settings.Setting[object], text: str) -> None:
    with pytest.raises(SettingError, match=f"{setting.name}='{text}' is not valid") as caught:
        setting.read({setting.name: text})
    assert setting.meaning in str(caught.value)


def test_a_duration_is_seconds_or_a_timedelta() -> None:
    assert seconds("wait", 1.5) == 1.5
    assert seconds("wait", timedelta(minutes=2)) == 120.0
    for wrong in (0, -1.0, float("nan"), timedelta(0)):
        with pytest.raises(SettingError, match="must be positive"):
            seconds("wait", wrong)


def test_an_error_is_an_answer_in_one_line() -> None:
    error = ShapeError("shard", "dim 0 has size 6, not a multiple of 4.", "Pad to 8.", rank=3, where="dp=2 tp=4")
    assert str(error) == "shard: dim 0 has size 6, not a multiple of 4. Pad to 8. [rank 3, dp=2 tp=4]"
    assert isinstance(error, ValueError)
    assert str(DisttrainError("do", "it failed.")) == "do: it failed."
    assert isinstance(StoreTimeoutError("get", "late."), TimeoutError)
