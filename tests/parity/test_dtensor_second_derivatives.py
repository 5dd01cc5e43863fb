"""Second derivatives of torch's operators over cut dims, judged by plain tensors; every gradient is a DTensor."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard
from disttrain.testing import run_threads
from tests.cases.shardings import mesh_of
from tests.dtensor_ops.cases import Call, calls_of, can_be_added, with_tensors
from tests.dtensor_ops.infos import info_named
from tests.dtensor_ops.judge import distributed

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLED = (
    "abs",
    "addcmul",
    "copysign",
    "cumprod",
    "hypot",
    "index_select",
    "linalg.det",
    "linalg.matrix_norm",
    "linalg.slogdet",
    "linalg.svdvals",
    "masked.softmax",
    "max",
    "nn.functional.adaptive_avg_pool2d",
    "nn.functional.avg_pool2d",
    "nn.functional.batch_norm",
    "nn.functional.group_norm",
    "nn.functional.max_pool2d",
    "nn.functional.normalize",
    "nn.functional.pad",
    "nn.functional.softsign",
    "norm",
    "renorm",
    "sgn",
    "special.i0e",
    "trace",
    "xlogy",
)
"""Those whose formulas make plain tensors on the way, and a few of each family."""


def twice(call: Call, operands: dict[int, Any]) -> list[torch.Tensor | None] | None:
    """First and second derivatives; None where there is none."""
    first, args, kwargs = with_tensors(call.values, operands)
    result = call.sample.output_process_fn_grad(call.function(first, *args, **kwargs))
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    inputs = [tensor for tensor in operands.values() if tensor.requires_grad]
    if not outputs or not inputs:
        return None
    weights = [output.detach().mul(0.5).cos() for output in outputs]
    grads = torch.autograd.grad(outputs, inputs, weights, allow_unused=True, create_graph=True)
    again = [grad for grad in grads if grad is not None and grad.requires_grad]
    if not again:
        return list(grads)
    weights = [grad.detach().mul(0.3).add(1) for grad in again]
    return [*grads, *torch.autograd.grad(again, inputs, weights, allow_unused=True)]


def layouts_of(call: Call) -> list[list[Placement]]:
    """All operands cut along one dim, as far as they have it, or partial, or whole."""
    found: dict[tuple[Placement, ...], list[Placement]] = {}
    most_dims = max(tensor.ndim for tensor in call.operands)
    for place in range(most_dims + 2):
        layout: list[Placement] = []
        for tensor in call.operands:
            kinds: list[Placement] = [*map(Shard, range(tensor.ndim))]
            kinds += [Partial()] if can_be_added(tensor.dtype) else []
            layout.append([*kinds, Replicate()][min(place, len(kinds))])
        found[tuple(layout)] = layout
    return list(found.values())


def check(call: Call, wanted: list[torch.Tensor | None], layout: list[Placement]) -> None:
    mesh = mesh_of((2,))
    operands = {
        id(tensor): distributed(tensor, mesh, [placement], needs_grad=True)
        for tensor, placement in zip(call.operands, layout, strict=True)
    }
    found = twice(call, operands)
    assert found is not None
    for one, other in zip(found, wanted, strict=True):
        if other is None or one is None:
            value = one if other is None else other
            assert value is None or not value.any(), "one is a gradient, and the other is not"
            continue
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.detach().full_tensor(), other.detach(), rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", SAMPLED)
def test_second_derivatives(name: str) -> None:
    num_cases = 0
    for call in calls_of(info_named(name)):
        if call.kind != "function" or not call.needs_grad:
            continue
        plain = {id(one): one.detach().clone().requires_grad_(one.requires_grad) for one in call.operands}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = twice(call, plain)
        for layout in layouts_of(call) if wanted is not None else ():
            try:
                run_threads(2, check, call, wanted, layout)
            except BaseException as error:
                error.add_note(f"{[tuple(tensor.shape) for tensor in call.operands]} as {layout}")
                raise
            num_cases += 1
    assert num_cases > 2
