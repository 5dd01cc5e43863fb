"""Which layers `use_float8` changes, by measured times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from disttrain.errors import ShapeError
from disttrain.kernels import use_float8
from disttrain.kernels.float8 import use
from disttrain.kernels.float8.gain import Gain


def measures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The sizes that are measured, as on a GPU where layers of 33 and more are faster in float8."""
    sizes: list[tuple[object, ...]] = []

    def measured(rows: int, columns: int, has_bias: bool, num_tokens: int, *rest: Any) -> Gain:
        if (rows, columns, num_tokens) not in sizes:
            sizes.append((rows, columns, num_tokens))
        return Gain(rows, columns, num_tokens, 2e-3, 1e-3 if rows > 32 else 1.95e-3, 1.5e-3)

    monkeypatch.setattr(use, "measured", measured)
    monkeypatch.setattr(use, "_device", lambda _: torch.device("cuda", 0))
    return sizes


def gated() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 64)])})


def test_layers_that_are_not_faster_are_left_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, lines = measures(monkeypatch), []
    model = gated()
    assert [one.name for one in use_float8(model, report=lines.append)] == ["blocks.0", "blocks.2"]
    assert sizes == [(64, 32, 8192), (32, 64, 8192)]
    assert lines == [
        "use_float8: ModuleDict: 2 linear layers",
        "use_float8: left blocks.1: 8192 x 64 to 32 take 2.000 ms in bf16, 1.950 ms in float8",
        "use_float8: 8192 x 32 to 64 take 2.000 ms in bf16, 1.000 ms in float8",
        "use_float8: one by one, launches of a layer take 1.500 ms: take compile_blocks",
    ]
    assert type(model["blocks"][1]) is nn.Linear


def test_when_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, lines = measures(monkeypatch), []
    assert len(use_float8(gated(), num_tokens=None, report=lines.append)) == 3
    assert len(use_float8(gated(), filter=lambda *_: True, report=lines.append)) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(use_float8(gated(), report=lines.append)) == 3
    assert "use_float8: nothing is measured before init_process_group, since ranks could not agree" in lines
    assert not sizes
    with pytest.raises(ShapeError, match="num_tokens is 0"):
        use_float8(gated(), num_tokens=0)


@pytest.mark.parametrize(("bf16_s", "float8_s", "is_faster"), [(1.04, 1, False), (1.06, 1, True), (9e-5, 7e-5, False)])
def test_what_pays(bf16_s: float, float8_s: float, is_faster: bool) -> None:
    """Not what the host takes longer to launch than the GPU to compute."""
    assert Gain(16, 16, 1, bf16_s, float8_s, 0.0).pays == is_faster
