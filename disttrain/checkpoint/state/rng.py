"""The state of the random number generators: torch's on the CPU and on this rank's GPU, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from disttrain.checkpoint.stateful import PerRank
from disttrain.errors import ArgumentError
from disttrain.process_group import get_rank, is_initialized
from disttrain.process_group.calls.packing import pack


def rng_state() -> dict[str, Any]:
    """The state of this rank's generators: {"generators": PerRank(...)}. "cuda" is there once this process has used a
    GPU."""
    generators: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state()
    return {"generators": PerRank(generators, _own_rank())}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Go on as the saved generators would have.

    The state of another rank, which a rank gets when there are more of them now than there were, makes seeds of this
    rank's own: no two ranks draw the same numbers, and every resume of the same save draws the same.
    """
    value: object = state
    saved = value.get("generators") if isinstance(value, Mapping) else None
    if not isinstance(saved, PerRank):
        raise ArgumentError(
            "set_rng_state", f"{type(state).__name__} is given, without generators.", "Give what rng_state() returned."
        )
    own_rank = _own_rank()
    if saved.rank != own_rank:
        seed = xxhash.xxh3_64_intdigest(pack([saved.value["cpu"], own_rank]))
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed % 2**63)
        return
    random.setstate(saved.value["python"])
    np.random.set_state(saved.value["numpy"])
    torch.set_rng_state(saved.value["cpu"])
    if "cuda" in saved.value and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved.value["cuda"])


class RngState:
    """The generators as a Stateful: put one into the state that is saved and loaded."""

    def state_dict(self) -> dict[str, Any]:
        """See `rng_state`."""
        return rng_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `set_rng_state`."""
        set_rng_state(state_dict)


def _own_rank() -> int:
    return get_rank() if is_initialized() else 0
