"""Formulas of results beside torch's kernels for the meta device, in the calls of torch's own samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from disttrain.dtensor.dispatch.outputs import global_outputs
from disttrain.dtensor.dispatch.outputs.known_results import known_results
from tests.dtensor_ops.cases import calls_of, plain_result, run_call
from tests.dtensor_ops.infos import info_named

NAMES = (
    *("addbmm", "addmm", "addmv", "addr", "baddbmm", "diagonal", "dot", "gather", "index_add", "index_copy"),
    *("index_fill", "index_put", "logical_and", "masked_scatter", "mv", "repeat", "scatter", "scatter_add", "select"),
    *("nn.functional.channel_shuffle", "nn.functional.conv2d", "nn.functional.grid_sample"),
    *("nn.functional.cross_entropy", "nn.functional.group_norm", "nn.functional.max_unpool2d"),
    *("nn.functional.pad constant", "nn.functional.pixel_shuffle", "nn.functional.unfold", "__getitem__"),
    *("take", "tril", "unfold", "zero_"),
)


class Beside(TorchDispatchMode):
    """Compares the formula of each operator, where there is one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_known = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shown, keywords = tree_map(on_meta, (list(args), kwargs or {}))
        known = known_results(func, shown, keywords)
        if known is not None:
            self.num_known += 1
            made = global_outputs._outputs(func, shown, keywords)
            assert described(known) == described(made), (func, shown, keywords)
        return func(*args, **(kwargs or {}))


def on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def described(outputs: Any) -> Any:
    return outputs and [(tuple(output.shape), output.stride(), output.dtype) for output in outputs]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", NAMES)
def test_formulas_are_as_torch_in_the_calls_of_its_samples(name: str) -> None:
    beside = Beside()
    for call in calls_of(info_named(name)):
        if call.kind != "out=" and plain_result(call) is not None:
            operands = {
                id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad and call.needs_grad)
                for tensor in call.operands
            }
            with beside:
                run_call(call, operands, None)
    assert beside.num_known > 0
