"""What a printed program needs to run by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import disttrain
from disttrain.testing import run_threads
from tests.dtensor_programs.execute import (
    backward,
    gradient,
    leaf_maker,
    plain_leaf,
    plain_redistribute,
    redistribute,
)
from tests.dtensor_programs.program import leaves_of
from tests.dtensor_programs.run import difference, read

__all__ = ["backward", "differences", "gradient", "main"]

WrittenProgram = Callable[[Any, Any], list[Any]]


def main(program: WrittenProgram, mesh_shape: tuple[int, ...]) -> None:
    """Run it on DTensors and on plain tensors, and print what differs."""
    torch.set_num_threads(1)
    print(*differences(program, mesh_shape) or ["the same"], sep="\n")


def differences(program: WrittenProgram, mesh_shape: tuple[int, ...]) -> list[str]:
    """What is not as plain torch has it, on any rank."""
    by_rank = run_threads(int(torch.Size(mesh_shape).numel()), _differences, program, mesh_shape)
    return [text for texts in by_rank for text in texts]


def _differences(program: WrittenProgram, mesh_shape: tuple[int, ...]) -> list[str]:
    mesh = disttrain.init_device_mesh("cpu", mesh_shape)
    found, expected = program(leaf_maker(mesh), redistribute), program(plain_leaf, plain_redistribute)
    pairs = zip(map(_read, found), map(_read, expected), strict=True)
    return [
        f"result {place}: {text}"
        for place, (ours, plain) in enumerate(pairs)
        for one, other in zip(ours, plain, strict=True)
        if (text := difference(one, other))
    ]


def _read(result: Any) -> list[Any]:
    leaves = list(leaves_of(result))
    grads = [leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
    return [read(leaf) for leaf in [*leaves, *grads]]
