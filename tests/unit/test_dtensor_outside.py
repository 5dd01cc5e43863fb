"""DTensors have no memory of their own: what reaches for it takes this rank's part, or is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from disttrain import init_device_mesh
from disttrain.dtensor import DTensor, Shard, distribute_tensor
from disttrain.errors import LayoutError
from disttrain.testing import run_threads


def cut() -> DTensor:
    return distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2,)), [Shard(0)])


def test_the_part_is_shared_with_forked_processes() -> None:
    def main() -> None:
        tensor = cut()
        assert not tensor.is_shared()
        assert tensor.share_memory_() is tensor
        assert tensor.is_shared()
        assert tensor.to_local().is_shared()
        assert not tensor.is_pinned()
        assert tensor.tolist() == [0, 1, 2, 3, 4, 5]

    run_threads(2, main)


@pytest.mark.parametrize(
    "use",
    [
        torch.from_dlpack,
        np.from_dlpack,
        torch.utils.dlpack.from_dlpack,
        lambda tensor: tensor.apply_(abs),
        lambda tensor: tensor.map_(tensor, max),
        pickle.dumps,
    ],
)
def test_others_ways_to_memory_are_refused(use: Callable[[Any], Any]) -> None:
    def main() -> None:
        with pytest.raises(LayoutError, match=r"to_local\(\)|full_tensor\(\)"):
            use(cut())

    run_threads(2, main)
