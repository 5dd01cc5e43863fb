"""`python -m disttrain info`: all that a report needs, and no secrets."""

from __future__ import annotations

import json

import pytest
import torch

import disttrain
from disttrain.__main__ import main
from disttrain.doctor import info


def test_it_tells_versions_transports_machine_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTRAIN_DEBUG", "detail")
    found = info.collect()
    assert found["packages"]["disttrain"].startswith(disttrain.__version__)
    assert found["packages"]["torch"] == torch.__version__.partition("+")[0] or found["packages"]["torch"]
    assert found["store"]["libuv by"] in {"pyuv", "uvloop"}
    assert found["torch"]["gloo"] == "yes"
    assert "cores" in found["machine"]
    assert found["settings"]["DISTTRAIN_DEBUG"] == "'detail'"


def test_a_broken_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert info._torch_facts()["torch"].startswith("cannot be imported: ModuleNotFoundError")


def test_a_setting_that_makes_no_sense_is_told() -> None:
    found = info.collect({"DISTTRAIN_DEBUG": "loud", "RANK": "1"})
    assert found["settings"] == {
        "RANK": "1",
        "DISTTRAIN_DEBUG": "DISTTRAIN_DEBUG='loud' is not valid: it must be off, info or detail.",
    }


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"]])
def test_as_text_and_as_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    if "--json" in arguments:
        assert json.loads(printed)["system"]["Python"]
    else:
        assert printed.startswith("system\n  Python ")
        assert "\npackages\n" in printed
