"""Tensors on the device that the run's transport carries: the same case runs over Gloo and over NCCL."""

from __future__ import annotations

import torch

import disttrain


def device() -> torch.device:
    """The CPU over Gloo; over NCCL this rank's GPU."""
    world = disttrain.current_world()
    return world.device if world.default_group.serves("cuda") else torch.device("cpu")


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device=device())
