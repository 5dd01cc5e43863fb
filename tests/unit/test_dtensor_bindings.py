"""The short ways to operators take the arguments, and give the results, of the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disttrain.dtensor._torch import BOUND_FUNCTIONS, BOUND_LINALG, BOUND_METHODS, OpOverload, binding_of

aten = torch.ops.aten


def values(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))) + 0.5


X, ROW, CUBE = values(3, 4), values(4), values(2, 3, 4)
UNARY = ("abs", "cos", "exp", "log", "neg", "relu", "rsqrt", "sigmoid", "sin", "sqrt", "tanh", "t", "zeros_like")
CALLS: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = [
    *[(getattr(aten, name).default, (X,), {}) for name in UNARY],
    (aten._log_softmax.default, (X, 1, False), {}),
    (aten._log_softmax_backward_data.default, (X, X, 1, torch.float64), {}),
    (aten._softmax.default, (X, -1, False), {}),
    (aten._softmax_backward_data.default, (X, X, 1, torch.float64), {}),
    (aten.add.Tensor, (X, ROW), {"alpha": 3}),
    (aten.add.Tensor, (X, 2), {}),
    (aten.add.Scalar, (X, 2.5), {}),
    (aten.add_.Tensor, (X, ROW), {"alpha": 3}),
    (aten.addmm.default, (ROW, values(3, 5), values(5, 4)), {"beta": 2, "alpha": 0.5}),
    (aten.baddbmm.default, (CUBE, values(2, 3, 5), values(2, 5, 4)), {}),
    (aten.bmm.default, (CUBE, values(2, 4, 5)), {}),
    (aten.cat.default, ([X, X], 1), {}),
    (aten.clone.default, (X.t(),), {"memory_format": torch.contiguous_format}),
    (aten.copy_.default, (X, ROW), {}),
    (aten.detach.default, (X,), {}),
    (aten.div.Tensor, (X, ROW), {}),
    (aten.div.Tensor_mode, (X, 0.3), {"rounding_mode": "floor"}),
    (aten.div_.Tensor, (X, ROW), {}),
    (aten.expand.default, (ROW, [3, -1]), {"implicit": False}),
    (aten.linalg_vector_norm.default, (X,), {}),
    (aten.linalg_vector_norm.default, (X, float("inf"), [1], True), {"dtype": torch.float64}),
    (aten.mean.default, (X,), {"dtype": torch.float32}),
    (aten.mean.dim, (X, [0], True), {}),
    (aten.mm.default, (X, values(4, 5)), {}),
    (aten.mul.Tensor, (X, True), {}),
    (aten.mul_.Tensor, (X, ROW), {}),
    (aten.native_layer_norm.default, (X, [4], ROW, None, 1e-5), {}),
    (aten.permute.default, (CUBE, [2, 0, 1]), {}),
    (aten.stack.default, ([X, X], 1), {}),
    (aten.sub.Tensor, (X, ROW), {"alpha": 2}),
    (aten.sub_.Tensor, (X, 1), {}),
    (aten.sum.default, (X,), {}),
    (aten.sum.dim_IntList, (X, [1], True), {"dtype": torch.float32}),
    (aten.sum.dim_IntList, (X, None), {}),
    (aten.transpose.int, (X, 0, 1), {}),
    (aten.unsqueeze.default, (X, -1), {}),
    (aten.view.default, (X, [2, -1]), {}),
    (aten.view.dtype, (X, torch.int64), {}),
    (aten.where.self, (X > 1, X, ROW), {}),
    (aten.zero_.default, (X,), {}),
    (aten.zeros_like.default, (X,), {"dtype": torch.int32, "pin_memory": False}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_a_binding_is_its_operator(call: tuple[OpOverload, tuple[Any, ...], dict[str, Any]]) -> None:
    op, args, kwargs = call
    binding = binding_of(op)
    assert binding is not op
    found, wanted = (
        run(*[arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args], **kwargs) for run in (binding, op)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for one, other in zip(as_tuple(found), as_tuple(wanted), strict=True):
        assert one.stride() == other.stride()


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(results) if isinstance(results, tuple) else (results,)


def test_every_binding_is_tried() -> None:
    bound = BOUND_FUNCTIONS | BOUND_LINALG | BOUND_METHODS
    assert {op._schema.name.partition("::")[2] for op, _, _ in CALLS} == bound


def test_an_operator_without_a_known_binding_is_called_itself() -> None:
    assert binding_of(aten.add.out) is aten.add.out
    assert binding_of(aten.cumsum.default) is aten.cumsum.default
