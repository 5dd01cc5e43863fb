"""Checkpoints: a state saved by any number of ranks, whole or not at all, and loaded by any other number.

A state is a dict, to any depth, of tensors, DTensors, modules, plain values and objects with a state of their own
(`Stateful`). `docs/checkpoint_format.md` says what lies on the disk.

    checkpointer = Checkpointer("runs/lm")
    state = {**get_state_dict(model, optimizer), "rng": RngState(), "step": step}
    checkpointer.save(step, state)
    ...
    state = {**get_state_dict(model, optimizer), "rng": RngState(), "step": 0}
    checkpointer.load(state)
    set_state_dict(model, optimizer, state)
"""

from __future__ import annotations

from disttrain.checkpoint.checkpointer import Checkpointer
from disttrain.checkpoint.loading import load
from disttrain.checkpoint.rng import RngState, rng_state, set_rng_state
from disttrain.checkpoint.saving import save
from disttrain.checkpoint.state import get_state_dict, set_state_dict
from disttrain.checkpoint.stateful import PerRank, Stateful, Unfilled, Value
from disttrain.checkpoint.storage import LocalStorage, Storage

__all__ = [
    "Checkpointer",
    "LocalStorage",
    "PerRank",
    "RngState",
    "Stateful",
    "Storage",
    "Unfilled",
    "Value",
    "get_state_dict",
    "load",
    "rng_state",
    "save",
    "set_rng_state",
    "set_state_dict",
]
