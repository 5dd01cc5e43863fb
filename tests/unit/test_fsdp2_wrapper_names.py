"""Names that wrappers of other libraries give a model, asked of a sharded module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from disttrain.fsdp2 import FSDPModule, fully_shard
from disttrain.fsdp2.modules.wrapper_names import INSTEAD
from disttrain.testing import run_threads


class Own(nn.Module):
    """A model that has some of those names itself, in each way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.step = nn.Linear(2, 2), 3
        self.register_buffer("reducer", torch.ones(2))

    @property
    def backward(self) -> int:
        return 7

    @property
    def load_checkpoint(self) -> Any:
        return self.missing

    def join(self) -> int:
        return 5

    def __getattr__(self, name: str) -> Any:
        return 9 if name == "save_checkpoint" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(x) * self.reducer
        return result


def test_who_asks_for_a_wrappers_name_is_told_what_to_write() -> None:
    def body() -> None:
        model: Any = fully_shard(nn.Sequential(nn.Linear(2, 2)))
        for name, remedy in INSTEAD.items():
            assert not hasattr(model, name)
            with pytest.raises(AttributeError) as caught:
                getattr(model, name)
            assert str(caught.value) == f"FSDPSequential has no {name!r}, since fully_shard wraps nothing: {remedy}."
        with pytest.raises(AttributeError, match="'FSDPSequential' object has no attribute 'unknown'"):
            _ = model.unknown
        assert not [name for name in INSTEAD if hasattr(FSDPModule, name)]

    run_threads(1, body)


def test_a_model_s_own_names_stay_its_own() -> None:
    def body() -> None:
        model: Any = fully_shard(Own())
        assert model(torch.ones(1, 2)).shape == (1, 2)
        model.step += 1
        assert (model.step, model.backward, model.join(), model.save_checkpoint) == (4, 7, 5, 9)
        assert isinstance(model.module, nn.Linear)
        assert model.reducer.tolist() == [1, 1]
        with pytest.raises(AttributeError, match="'FSDPOwn' object has no attribute 'load_checkpoint'"):
            _ = model.load_checkpoint
        del model.module
        with pytest.raises(AttributeError, match="write model itself"):
            _ = model.module

    run_threads(1, body)


def test_graphs_hold_modules_with_such_names() -> None:
    def body() -> None:
        model: Any = Own()
        whole = model(torch.ones(1, 2))
        sharded: Any = fully_shard(model)
        sharded.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(sharded(torch.ones(1, 2)), whole)

    run_threads(1, body)
