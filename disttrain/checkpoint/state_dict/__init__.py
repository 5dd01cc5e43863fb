"""State dicts as torch.distributed.checkpoint.state_dict gives and takes them, for every parallelism of ours."""

from __future__ import annotations

from disttrain.checkpoint.state_dict.calls import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from disttrain.checkpoint.state_dict.options import StateDictOptions

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
