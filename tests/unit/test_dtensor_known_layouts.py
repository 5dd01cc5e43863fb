"""How results lie that formulas know, beside what torch's operators make of operands that lie in other ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Final

import pytest
import torch
from torch.utils._pytree import tree_map

from disttrain.dtensor.dispatch.outputs.known_results import known_results

SHAPE: Final = (2, 4, 6, 8)


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in rows with room behind them."""
    return torch.cat([tensor, tensor[..., :3]], dim=-1)[..., : tensor.shape[-1]]


LAYOUTS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "as new": torch.Tensor.contiguous,
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "columns first": lambda tensor: tensor.mT.contiguous().mT,
    "batch second": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
    "with room": _narrowed,
    "expanded": lambda tensor: tensor[:, :1].expand(tensor.shape),
}


def _calls(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> Iterator[tuple[Any, list[Any]]]:
    """Of operators that were measured to lie in ways of their own, and their siblings."""
    aten, few, grid = torch.ops.aten, index[0, 0, 0, :2], y[..., :2]
    yield aten.max_unpool2d.default, [x, index, [12, 16]]
    yield aten.im2col.default, [x, [2, 2], [1, 1], [0, 0], [2, 2]]
    yield aten.repeat.default, [x, [2, 1, 1, 1]]
    yield aten.take.default, [x, index]
    yield aten.grid_sampler_2d.default, [x, grid, 0, 0, False]
    yield aten.tril.default, [x]
    yield aten._softmax_backward_data.default, [x, y, -1, torch.float32]
    yield aten.scatter.value, [x, 1, index, 1.0]
    yield aten.scatter.src, [x, 1, index, y]
    yield aten.scatter_add.default, [x, 1, index, y]
    yield aten.gather.default, [x, 1, index]
    yield aten.index_put.default, [x, [few], y[:2]]
    yield aten.index_copy.default, [x, 0, few, y[:2]]
    yield aten.index_add.default, [x, 0, few, y[:2]]
    yield aten.index_fill.int_Scalar, [x, 1, few, 1.0]
    yield aten.index_select.default, [x, 1, few]
    yield aten.masked_fill.Scalar, [x, y > 0.5, 1.0]
    yield aten.masked_fill.Scalar, [x, y[:1, :1] > 0.5, 1.0]
    yield aten.masked_scatter.default, [x, y > 0.5, y]
    yield aten.constant_pad_nd.default, [x, [1, 1, 1, 1], 0.0]
    yield aten.pixel_shuffle.default, [x, 2]
    yield aten.pixel_unshuffle.default, [x, 2]
    yield aten.channel_shuffle.default, [x, 2]
    yield aten.index.Tensor, [x, [few]]
    yield aten.index.Tensor, [x, [None, few]]
    yield aten.index.Tensor, [x, [few, None, few]]
    yield aten.select_backward.default, [x[0], [*SHAPE], 0, 1]
    yield aten.slice_backward.default, [x[:, 1:3], [*SHAPE], 1, 1, 3, 1]
    yield aten.baddbmm.default, [x[0], y[0], y[0].mT @ y[0]]
    yield aten.addmm.default, [x[0, 0], y[0, 0], y[0, 0].mT @ x[0, 0]]
    yield aten.addmv.default, [x[0, 0, :, 0], y[0, 0], x[0, 0, 0]]
    yield aten.mv.default, [x[0, 0], y[0, 0, 0]]
    yield aten.nll_loss2d_forward.default, [x, index[:, 0], None, 0, -100]
    yield aten.mse_loss.default, [x, y, 0]
    yield aten.mse_loss_backward.default, [x, x, y, 0]
    yield aten.smooth_l1_loss.default, [x, y, 0, 1.0]
    yield aten.where.self, [y > 0.5, x, y]
    yield aten.sort.default, [x]
    yield aten.topk.default, [x, 2]
    yield aten.cumsum.default, [x, 1]
    if 0 not in x.stride():
        yield aten.add_.Tensor, [x, y]
        yield aten.mul_.Tensor, [x, y[:1, :1]]


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


@pytest.mark.parametrize(("first", "second"), [*product(LAYOUTS, LAYOUTS)])
def test_what_is_known_lies_as_what_torch_makes(first: str, second: str) -> None:
    x, y = LAYOUTS[first](torch.rand(SHAPE)), LAYOUTS[second](torch.rand(SHAPE))
    index = LAYOUTS[second](torch.randint(0, 2, SHAPE))
    num_known = 0
    for op, args in _calls(x, y, index):
        known = known_results(op, tree_map(_on_meta, args), {})
        if known is None:
            continue
        num_known += 1
        made = op(*args)
        for shown, result in zip(known, made if isinstance(made, tuple) else [made], strict=True):
            described = [(each.shape, each.stride(), each.dtype) for each in (shown, result)]
            assert described[0] == described[1], op
    assert num_known > 10
