"""C++ warnings that are kept from the screen."""

from __future__ import annotations

import pytest
import torch

from disttrain.errors import GroupError
from disttrain.process_group.cpp_warnings import without_warning


def warn() -> None:
    torch.ops.aten.var(torch.ones(1))  # of one number: C++ warns, and on stderr where nobody translates it


def test_only_the_named_warning_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    without_warning("var.*degrees of freedom", warn)
    with pytest.warns(UserWarning, match="degrees of freedom"):
        without_warning("something else", warn)
    assert capfd.readouterr() == ("", "")


def test_errors_come_through() -> None:
    failure = GroupError("isend", "it failed.")

    def fail() -> None:
        raise failure

    with pytest.raises(GroupError) as caught:
        without_warning("anything", fail)
    assert caught.value is failure
