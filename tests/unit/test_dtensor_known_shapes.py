"""Results of frequent operators by formulas, beside torch's kernels for the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disttrain.dtensor.dispatch.outputs import global_outputs
from disttrain.dtensor.dispatch.outputs.known_pointwise import _OF_TRUTH, _UNTAGGED, formula_of
from disttrain.dtensor.dispatch.outputs.known_results import OF_SAMPLES, RESULTS, known_results
from disttrain.dtensor.dispatch.outputs.known_shapes import FORMULAS, known_outputs
from tests.cases.drawn_arguments import Drawn, DrawnOfKinds


def described(outputs: tuple[torch.Tensor, ...] | None) -> list[Any] | None:
    return outputs and [(tuple(output.shape), output.stride(), output.dtype) for output in outputs]


@pytest.mark.parametrize("op", FORMULAS, ids=str)
def test_a_formula_is_as_torch_or_is_not_there(op: Any) -> None:
    num_known = 0
    for seed in range(150):
        args = Drawn(seed).arguments(str(op))
        known = known_outputs(op, args, {})
        if known is not None:
            num_known += 1
            assert described(known) == described(global_outputs._outputs(op, args, {})), args
    assert num_known > 2


@pytest.mark.parametrize("op", [op for op in RESULTS if op not in OF_SAMPLES], ids=str)
def test_a_formula_of_several_dtypes_is_as_torch_or_is_not_there(op: Any) -> None:
    num_known = 0
    for seed in range(200):
        args = DrawnOfKinds(seed).arguments(str(op))
        kwargs = {"correction": 1} if str(op).endswith("correction") else {}
        known = known_results(op, args, kwargs)
        if known is not None:
            num_known += 1
            assert described(known) == described(global_outputs._outputs(op, args, kwargs)), args
    assert num_known > 2


def _pointwise_operators() -> list[Any]:
    aten = torch.ops.aten
    named = {name.partition(".")[2] for name in (*_UNTAGGED, *_OF_TRUTH)}
    names = sorted(named | {name for name in dir(aten) if name[0] != "_" or name in named})
    packets = [getattr(aten, name) for name in names if hasattr(getattr(aten, name, None), "overloads")]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    # Of those in TorchScript alone nothing is known to the dispatcher.
    overloads = [op for op in overloads if torch._C._dispatch_has_kernel(op.name())]
    return [op for op in overloads if "special_" not in str(op) and formula_of(op) is not None]


def test_the_formula_of_pointwise_operators_is_as_torch_or_is_not_there() -> None:
    """Of those that the schemas take for pointwise, with numbers where these have some."""
    operators = _pointwise_operators()
    names = {str(op) for op in operators}
    assert {"aten.hardswish.default", "aten.leaky_relu_backward.default", "aten.atan2.default"} <= names
    num_known = 0
    for op in operators:
        for seed in range(12):
            drawn = DrawnOfKinds(seed)
            shape = drawn.shape()
            args: list[Any] = []
            for argument in op._schema.arguments:
                kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
                if argument.kwarg_only:
                    break
                if kind == "Tensor":
                    args.append(drawn.operand(shape))
                elif argument.has_default_value():
                    args.append(argument.default_value)
                else:
                    args.append({"bool": True, "int": 1}.get(kind, 0.5))
            if op._schema.is_mutable:
                args[0] = torch.empty(shape, dtype=drawn.dtype, device="meta")
            known = known_results(op, args, {})
            if known is None:
                continue
            try:
                expected = global_outputs._outputs(op, args, {})
            except (RuntimeError, TypeError, ValueError):
                continue  # torch refuses it, and the kernel of the part will say so
            num_known += 1
            assert described(known) == described(expected), (op, args)
    assert num_known > 1000


def test_the_gradient_of_a_layer_norm_lies_as_the_kernel_makes_it() -> None:
    """Of a gradient that is permuted torch's kernel for shapes says that the result is so too, which no device's is."""
    op = torch.ops.aten.native_layer_norm_backward.default
    for wanted in ([True, False, False], [True, True, True], [False, True, True]):
        args = [
            *(torch.ones(4, 3, 2).permute(2, 1, 0), torch.ones(2, 3, 4), [4]),
            *(torch.ones(2, 3, 1), torch.ones(2, 3, 1), torch.ones(4), torch.ones(4), wanted),
        ]
        on_meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in args]
        known = known_outputs(op, on_meta, {})
        assert known is not None
        for shown, made in zip(known, op(*args), strict=True):
            if made is not None:
                assert (shown.shape, shown.stride(), shown.dtype) == (made.shape, made.stride(), made.dtype)


def test_the_formula_of_attention_is_as_torch() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for shape in ([2, 3, 4, 5], [1, 3, 4, 5], [2, 1, 1, 8]):
        for swapped in (False, True):
            query, key = (torch.empty(shape, device="meta") for _ in range(2))
            if swapped:
                query, key = (
                    torch.empty([shape[0], shape[2], shape[1], shape[3]], device="meta").transpose(1, 2)
                    for _ in range(2)
                )
            args = [query, key, key, 0.0, True]
            known = known_results(op, args, {})
            if known is None:
                assert swapped, "and a dim of one, so that the order of dims is not to be seen"
                assert 1 in shape
                continue
            assert described(known) == described(global_outputs._outputs(op, args, {}))
