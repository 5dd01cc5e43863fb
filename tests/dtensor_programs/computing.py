"""Steps that compute element by element, as functions and in place."""

from __future__ import annotations

from typing import Any

import torch

from tests.dtensor_programs.draw import Draw, Value

EXACT_UNARY = (
    "neg abs relu sign floor ceil round trunc square positive nan_to_num frac sgn signbit isfinite logical_not"
)
ROUNDING_UNARY = "exp sin cos tanh sigmoid expm1 erf sqrt reciprocal rsqrt atan log1p log sinc deg2rad asinh exp2"
FUNCTIONAL = (
    "gelu silu softplus leaky_relu elu hardtanh softsign hardswish mish logsigmoid relu6 hardshrink tanhshrink selu"
)
SPECIAL = "erfcx i0e ndtr entr sinc log_ndtr i1e erfinv"
IN_PLACE_UNARY = (
    "neg_ abs_ relu_ exp_ sin_ tanh_ sigmoid_ square_ floor_ round_ sign_ sqrt_ zero_ nan_to_num_ cos_ trunc_ expm1_"
)
EXACT_BINARY = "add sub mul maximum minimum fmax fmin copysign"
ROUNDING_BINARY = "div atan2 hypot logaddexp xlogy true_divide float_power"
COMPARISONS = "gt lt ge le eq ne logical_and logical_or logical_xor"
IN_PLACE_BINARY = (
    "add_ sub_ mul_ div_ copy_ copysign_ add_ mul_ copy_ sub_ atan2_ hypot_ nextafter_ xlogy_ gt_ logical_and_"
)
INTEGERS = (
    "add mul sub div floor_divide remainder bitwise_and bitwise_or bitwise_xor bitwise_left_shift maximum gcd pow lt"
    " add_ mul_ sub_ bitwise_xor_ lcm bitwise_right_shift __lshift__ __rshift__ __ilshift__ __irshift__"
)
NUMBERS: tuple[Any, ...] = (0, 1, 2, -1, 3, 0.5, -2.0, 0.25, 1.5)


def unary(draw: Draw) -> None:
    x = draw.floating() if draw.random.random() < 0.85 else draw.any()
    kind = draw.random.random()
    if kind < 0.4:
        draw.do(f".{draw.name(EXACT_UNARY)}", x)
    elif kind < 0.75:
        draw.do(f".{draw.name(ROUNDING_UNARY)}", x, rounds=True)
    elif kind < 0.95:
        draw.do(f"torch.nn.functional.{draw.name(FUNCTIONAL)}", x, rounds=True)
    else:
        draw.do(f"torch.special.{draw.name(SPECIAL)}", x, rounds=True)


def unary_in_place(draw: Draw) -> None:
    draw.do(f".{draw.name(IN_PLACE_UNARY)}", draw.any(), rounds=True)


def binary(draw: Draw) -> None:
    x = draw.any() if draw.random.random() < 0.3 else draw.floating()
    other: Any = draw.random.choice(NUMBERS)
    if draw.random.random() < 0.65:
        other = draw.broadcastable(x.shape, floating=draw.random.random() < 0.8)
    kind = draw.random.random()
    operands = [x, other]
    if isinstance(other, Value):
        draw.random.shuffle(operands)
    if kind < 0.55:
        draw.do(f".{draw.name(EXACT_BINARY)}", *operands)
    elif kind < 0.75:
        draw.do(f".{draw.name(ROUNDING_BINARY)}", *operands, rounds=True)
    elif kind < 0.85:
        draw.do(f".{draw.name(COMPARISONS)}", *operands)
    elif kind < 0.9:
        function = draw.name("remainder fmod floor_divide heaviside nextafter ldexp")
        draw.do(f"torch.{function}", *operands, rounds=True)
    elif kind < 0.95:
        draw.do(draw.random.choice(("torch.rsub", "torch.sub", "torch.add")), *operands, alpha=2)
    else:
        draw.do(".pow", x, draw.random.choice((2, 3, 0.5, 1, 0, -1)), rounds=True)


def binary_in_place(draw: Draw) -> None:
    x = draw.any()
    other: Any = draw.random.choice(NUMBERS)
    if draw.random.random() < 0.65:
        other = draw.broadcastable(x.shape, floating=x.is_float)
    name = draw.name(IN_PLACE_BINARY)
    if draw.random.random() < 0.15:
        draw.do(f".{draw.random.choice(('add_', 'sub_'))}", x, other, alpha=2)
    else:
        draw.do(f".{name}", x, other, rounds=name not in ("add_", "sub_", "mul_", "copy_", "copysign_"))


def ternary(draw: Draw) -> None:
    x = draw.floating()
    one, other = (draw.broadcastable(x.shape, dtype=x.tensor.dtype) for _ in range(2))
    kind = draw.random.choice(("addcmul", "addcdiv", "lerp", "lerp number", "clamp", "clamp numbers", "clamp_min"))
    suffix = draw.random.choice(("", "", "_"))
    if kind in ("addcmul", "addcdiv"):
        draw.do(f".{kind}{suffix}", x, one, other, value=draw.random.choice((1, 2, -0.5)), rounds=kind == "addcdiv")
    elif kind == "lerp":
        draw.do(f".lerp{suffix}", x, one, other, rounds=True)
    elif kind == "lerp number":
        draw.do(f".lerp{suffix}", x, one, 0.25, rounds=True)
    elif kind == "clamp":
        draw.do(f".clamp{suffix}", x, one, other)
    elif kind == "clamp numbers":
        draw.do(f".clamp{suffix}", x, draw.random.choice((None, -1, 0.5)), draw.random.choice((1, 0.75)))
    else:
        draw.do(f".{draw.random.choice(('clamp_min', 'clamp_max'))}{suffix}", x, draw.random.choice((one, 0.5, -1)))


def choose(draw: Draw) -> None:
    """where, masked_fill and the like."""
    x = draw.floating()
    mask = draw.broadcastable(x.shape, floating=False, dtype=torch.bool)
    kind = draw.random.choice(
        ("where", "where number", "masked_fill", "masked_fill_", "masked_fill 0-dim", "masked_fill mask of result")
    )
    if kind == "where":
        draw.do("torch.where", mask, x, draw.broadcastable(x.shape))
    elif kind == "where number":
        draw.do("torch.where", mask, draw.random.choice((0.0, 1.0, 2)), x)
    elif kind == "masked_fill 0-dim":
        value = draw.leaf((), x.tensor.dtype)
        draw.do(draw.random.choice((".masked_fill", ".masked_fill_")), x, mask, value)
    elif kind == "masked_fill mask of result":
        found = draw.do(".gt", x, 0)
        if found:
            draw.do(".masked_fill", x, found[0], 0.5)
    else:
        draw.do(f".{kind}", x, mask, draw.random.choice((0, -1.5, 2)))


def integers(draw: Draw) -> None:
    shape = draw.shape(1, 2)
    x = draw.pick(lambda value: value.tensor.dtype == torch.int64) or draw.indices(shape, 7)
    other: Any = draw.random.choice((1, 2, 3))
    if draw.random.random() < 0.5:
        other = draw.indices(x.shape, 4)
    name = draw.name(INTEGERS)
    draw.do(f".{name}", x, other, rounds=name == "div")


def fill(draw: Draw) -> None:
    x = draw.any()
    kind = draw.random.choice(
        (
            "fill_",
            "zero_",
            "fill_ tensor",
            "zeros_like",
            "ones_like",
            "full_like",
            "new_zeros",
            "new_ones",
            "new_full",
            "fill_diagonal_",
            "tril_",
        )
    )
    if kind == "fill_ tensor":
        draw.do(".fill_", x, draw.leaf((), x.tensor.dtype))
    elif kind == "fill_":
        draw.do(".fill_", x, draw.random.choice((0, 1, -2, 2)))
    elif kind in ("zeros_like", "ones_like"):
        draw.do(f"torch.{kind}", x)
    elif kind == "full_like":
        draw.do("torch.full_like", x, 2)
    elif kind in ("new_zeros", "new_ones"):
        draw.do(f".{kind}", x, draw.shape())
    elif kind == "new_full":
        draw.do(".new_full", x, draw.shape(), 3)
    elif kind == "fill_diagonal_":
        draw.do(".fill_diagonal_", x, 2)
    else:
        draw.do(f".{kind}", x)


def out(draw: Draw) -> None:
    x = draw.floating()
    other = draw.broadcastable(x.shape, dtype=x.tensor.dtype)
    target = draw.exactly(x.shape, x.tensor.dtype)
    name = draw.name("add mul maximum div exp cumsum tanh")
    if name in ("exp", "tanh"):
        draw.do(f"torch.{name}", x, out=target, rounds=True, may_overlap=False)
    elif name == "cumsum":
        draw.do("torch.cumsum", x, 0, out=target, may_overlap=False)
    else:
        draw.do(f"torch.{name}", x, other, out=target, rounds=name == "div", may_overlap=False)


def foreach(draw: Draw) -> None:
    dtype = torch.float64
    picked = [draw.pick(lambda value: value.tensor.dtype == dtype) for _ in range(3)]
    tensors = list(dict.fromkeys(value for value in picked if value is not None))
    others, more = ([draw.exactly(value.shape, dtype) for value in tensors] for _ in range(2))
    kind = draw.random.choice(("alone", "alone", "scalar", "two", "two", "three", "norm", "tensor", "alpha"))
    suffix = draw.random.choice(("", "_", "_"))
    if not tensors:
        return
    if kind == "norm":
        draw.do("torch._foreach_norm", tensors, draw.random.choice((2, 1, float("inf"))), rounds=True)
    elif kind == "alone":
        draw.do(f"torch._foreach_{draw.name('neg exp abs sqrt tanh')}{suffix}", tensors, rounds=True)
    elif kind == "scalar":
        number = draw.random.choice((0.5, 2, [0.5] * len(tensors)))
        draw.do(f"torch._foreach_{draw.name('add mul sub clamp_max')}{suffix}", tensors, number)
    elif kind == "two":
        name = draw.name("add mul sub maximum copy div")
        draw.do(f"torch._foreach_{name}{suffix}", tensors, others, rounds=name == "div", may_overlap=False)
    elif kind == "alpha":
        draw.do(f"torch._foreach_add{suffix}", tensors, others, alpha=0.5, may_overlap=False)
    elif kind == "tensor":
        draw.do(f"torch._foreach_mul{suffix}", tensors, draw.leaf((), dtype), may_overlap=False)
    elif draw.random.random() < 0.5:
        draw.do(f"torch._foreach_lerp{suffix}", tensors, others, 0.25, rounds=True, may_overlap=False)
    else:
        draw.do(f"torch._foreach_addcmul{suffix}", tensors, others, more, 0.5, may_overlap=False)


FAMILIES = {
    unary: 6,
    unary_in_place: 6,
    binary: 12,
    binary_in_place: 12,
    ternary: 5,
    choose: 4,
    integers: 2,
    fill: 4,
    out: 1,
    foreach: 4,
}
