"""Within inference_mode operators come undivided, and views of other tensors must be no inference tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from disttrain.dtensor import Replicate, Shard
from disttrain.testing import run_threads
from tests.cases.shardings import check, collectives_of, laid_out, mesh_of, normal

FUNCTIONS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "linear": (functional.linear, [normal(6, 4), normal(3, 4), normal(3)]),
    "matmul": (torch.matmul, [normal(2, 3, 4), normal(4, 5)]),
    "convert": (lambda x: x.to(torch.float32), [normal(5, 3)]),
    "reshape": (lambda x: x.reshape(2, 6).t().contiguous(), [normal(3, 4)]),
    "layer_norm": (lambda x: functional.layer_norm(x, (4,)), [normal(5, 4)]),
    "cross_entropy": (functional.cross_entropy, [normal(4, 3), torch.tensor([0, 2, 1, 1])]),
    "attention": (
        lambda q, k: functional.scaled_dot_product_attention(q, k, k, is_causal=True),
        [normal(2, 2, 3, 4), normal(2, 2, 5, 4)],
    ),
    "views": (lambda x: [x[1], x[None], x[:, 1:], x.view(-1), x.unbind(1)[0], x.detach()], [normal(4, 3)]),
    "views of views": (lambda x: [x[1][1:], x[1:][0], x.view(2, 6)[1].view(3, 2)], [normal(4, 3)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    function, operands = FUNCTIONS[name]
    check(torch.inference_mode()(function), *operands, num_choices=8)


def test_writing_through_views() -> None:
    def written(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        with torch.inference_mode():
            x[1].mul_(2)
            x[:, 1:].add_(1)
            x.view(-1)[2:7].zero_()
            x[1][1:].add_(x[0][1:])
        return x

    check(written, normal(4, 3))


def test_nothing_is_gathered_for_want_of_a_rule() -> None:
    def body() -> list[str]:
        mesh = mesh_of((2,))
        rows, weight = laid_out(normal(6, 4), mesh, [Shard(0)]), laid_out(normal(3, 4), mesh, [Replicate()])
        with torch.inference_mode():
            return collectives_of(
                lambda: functional.layer_norm(functional.linear(rows, weight), (3,)).to(torch.float32)
            )

    assert run_threads(2, body) == [[]] * 2
