"""Products of each expert's rows as Triton kernels; what they compute is what `reference.py` does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from disttrain.kernels._torch import traced
from disttrain.kernels.grouped.form import GatedForm


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr, limit, alpha):
    """The activated gate and its slope, the factor that it is multiplied with and that one's slope."""
    slope_up = tl.full(up.shape, 1.0, tl.float32)
    if ACTIVATION == "clamped":
        slope_up = tl.where((up >= -limit) & (up <= limit), 1.0, 0.0)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        inside = tl.where(gate <= limit, 1.0, 0.0)
        gate = tl.minimum(gate, limit)
        share = tl.sigmoid(alpha * gate)
        slope = share * (1.0 + alpha * gate * (1.0 - share)) * inside
    elif ACTIVATION == "silu":
        share = tl.sigmoid(gate)
        slope = share * (1.0 + gate * (1.0 - share))
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.math.erf(gate * 0.7071067811865476))
        slope = share + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    else:
        # (1 + tanh(a)) / 2 is sigmoid(2 a).
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        slope = share + gate * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    return gate * share, slope, up, slope_up


@triton.jit
def _gated(
    gate, up, ends, order, weights, result, row_stride, column_stride, row_size, limit, alpha,
    NUM_EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr, IS_SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # What lies past the last end is read by nobody.
    if row < tl.load(ends + NUM_EXPERTS - 1):
        scale = tl.load(weights + tl.load(order + row)).to(tl.float32) if IS_SCALED else 1.0
        for begin in range(0, row_size, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            is_there = columns < row_size
            source = row * row_stride + columns * column_stride
            a = tl.load(gate + source, mask=is_there, other=0.0).to(tl.float32)
            b = tl.load(up + source, mask=is_there, other=0.0).to(tl.float32)
            activated, _, factor, _ = _activate(a, b, ACTIVATION, limit, alpha)
            value = activated * factor * scale
            tl.store(result + row * row_size + columns, value.to(result.dtype.element_ty), mask=is_there)


@triton.jit
def _gated_backward(
    grad, gate, up, ends, order, weights, grad_gate, grad_up, value, grad_weights, row_stride, column_stride, row_size,
    limit, alpha, NUM_EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr, IS_SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    if row < tl.load(ends + NUM_EXPERTS - 1):
        scale = tl.load(weights + tl.load(order + row)).to(tl.float32) if IS_SCALED else 1.0
        for begin in range(0, row_size, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            is_there = columns < row_size
            source = row * row_stride + columns * column_stride
            a = tl.load(gate + source, mask=is_there, other=0.0).to(tl.float32)
            b = tl.load(up + source, mask=is_there, other=0.0).to(tl.float32)
            wished = tl.load(grad + row * row_size + columns, mask=is_there, other=0.0).to(tl.float32)
            activated, slope, factor, slope_up = _activate(a, b, ACTIVATION, limit, alpha)
            product = activated * factor
            scaled = wished * scale
            total += wished * product
            kind = value.dtype.element_ty
            tl.store(grad_gate + source, (scaled * factor * slope).to(kind), mask=is_there)
            tl.store(grad_up + source, (scaled * activated * slope_up).to(kind), mask=is_there)
            tl.store(value + row * row_size + columns, (product * scale).to(kind), mask=is_there)
    if IS_SCALED:
        tl.store(grad_weights + tl.load(order + row), tl.sum(total, 0))


@triton.jit
def _expert_of(row, ends, NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr):
    experts = tl.arange(0, WIDTH)
    limits = tl.load(ends + experts, mask=experts < NUM_EXPERTS, other=2147483647)
    return tl.sum((limits <= row).to(tl.int32), 0)


@triton.jit
def _add_bias(
    rows, bias, ends, order, weights, row_size, NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, IS_SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = _expert_of(row, ends, NUM_EXPERTS, WIDTH)
    if expert < NUM_EXPERTS:
        scale = tl.load(weights + tl.load(order + row)).to(tl.float32) if IS_SCALED else 1.0
        for begin in range(0, row_size, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            is_there = columns < row_size
            target = rows + row * row_size + columns
            added = tl.load(bias + expert.to(tl.int64) * row_size + columns, mask=is_there, other=0.0).to(tl.float32)
            value = tl.load(target, mask=is_there, other=0.0).to(tl.float32) + added * scale
            tl.store(target, value.to(rows.dtype.element_ty), mask=is_there)


@triton.jit
def _bias_grad(
    grad, ends, order, weights, result, row_size, IS_SCALED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sum of an expert's rows, in their order."""
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, LINES):
        rows = (first + tl.arange(0, LINES)).to(tl.int64)
        is_there = (rows < end)[:, None] & (columns < row_size)[None, :]
        value = tl.load(grad + rows[:, None] * row_size + columns[None, :], mask=is_there, other=0.0).to(tl.float32)
        if IS_SCALED:
            assignments = tl.load(order + rows, mask=rows < end, other=0)
            value *= tl.load(weights + assignments).to(tl.float32)[:, None]
        total += tl.sum(value, 0)
    tl.store(
        result + expert.to(tl.int64) * row_size + columns, total.to(result.dtype.element_ty), mask=columns < row_size
    )


@triton.jit
def _bias_weights_grad(
    grad, bias, ends, order, result, row_size, NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = _expert_of(row, ends, NUM_EXPERTS, WIDTH)
    total = tl.zeros((BLOCK,), tl.float32)
    if expert < NUM_EXPERTS:
        for begin in range(0, row_size, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            is_there = columns < row_size
            value = tl.load(grad + row * row_size + columns, mask=is_there, other=0.0).to(tl.float32)
            total += value * tl.load(bias + expert.to(tl.int64) * row_size + columns, mask=is_there, other=0.0)
    tl.store(result + tl.load(order + row), tl.sum(total, 0))


@triton.jit
def tile_of_rows(tile, ends, NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile of so many rows, the tile's first row, and the first row after the expert's. Tiles are
    counted expert by expert; past the last one the expert is NUM_EXPERTS."""
    experts = tl.arange(0, WIDTH)
    is_expert = experts < NUM_EXPERTS
    limits = tl.load(ends + experts, mask=is_expert, other=0)
    begins = tl.load(ends + experts - 1, mask=is_expert & (experts > 0), other=0)
    tiles = tl.where(is_expert, (limits - begins + ROWS - 1) // ROWS, 0)
    expert = tl.sum((is_expert & (tl.cumsum(tiles, 0) <= tile)).to(tl.int32), 0)
    before = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    begin = tl.sum(tl.where(experts == expert, begins, 0), 0)
    end = tl.sum(tl.where(experts == expert, limits, 0), 0)
    return expert, begin + (tile - before) * ROWS, end


@triton.jit
def _product(
    x, weight, result, ends, in_size, out_size, expert_stride, out_stride, in_stride, num_columns,
    NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's product."""
    tile, column = tl.program_id(0) // num_columns, tl.program_id(0) % num_columns
    expert, first, end = tile_of_rows(tile, ends, NUM_EXPERTS, WIDTH, ROWS)
    if expert < NUM_EXPERTS:
        rows = first + tl.arange(0, ROWS)
        outs, ins = column * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
        is_row, is_out = rows < end, outs < out_size
        lines = x + rows.to(tl.int64)[:, None] * in_size + ins[None, :]
        matrix = weight + expert.to(tl.int64) * expert_stride
        matrix += outs.to(tl.int64)[None, :] * out_stride + ins.to(tl.int64)[:, None] * in_stride
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for depth in range(0, in_size, DEPTH):
            is_in = ins < in_size - depth
            left = tl.load(lines, mask=is_row[:, None] & is_in[None, :], other=0.0)
            right = tl.load(matrix, mask=is_in[:, None] & is_out[None, :], other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
            lines += DEPTH
            matrix += DEPTH * in_stride
        target = result + rows.to(tl.int64)[:, None] * out_size + outs[None, :]
        tl.store(target, total.to(result.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


@triton.jit
def _outer(
    left, right, result, ends, left_size, right_size, num_lefts, num_rights, PRECISION: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's left.T @ right, over its rows."""
    program = tl.program_id(0)
    expert = program // (num_lefts * num_rights)
    lefts = (program % num_lefts) * LEFT + tl.arange(0, LEFT)
    rights = (program // num_lefts % num_rights) * RIGHT + tl.arange(0, RIGHT)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros((LEFT, RIGHT), tl.float32)
    for first in range(begin, end, DEPTH):
        rows = (first + tl.arange(0, DEPTH)).to(tl.int64)
        is_row = rows < end
        a = tl.load(
            left + rows[None, :] * left_size + lefts[:, None],
            mask=is_row[None, :] & (lefts < left_size)[:, None],
            other=0.0,
        )
        b = tl.load(
            right + rows[:, None] * right_size + rights[None, :],
            mask=is_row[:, None] & (rights < right_size)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    target = result + expert.to(tl.int64) * left_size * right_size
    target += lefts.to(tl.int64)[:, None] * right_size + rights[None, :]
    is_there = (lefts < left_size)[:, None] & (rights < right_size)[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=is_there)


def gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    ends: torch.Tensor,
    form: GatedForm,
    order: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """The products as in `reference.py`; nothing is written past the last end."""
    num_rows, size = gate.shape
    result = gate.new_empty(num_rows, size)
    with torch.cuda.device_of(gate):
        traced(_gated)[(num_rows,)](
            gate, up, ends, order, weights, result, *gate.stride(), size, form.limit, form.alpha, ends.shape[0],
            form.activation, order is not None, _block(size),
        )  # fmt: skip
    return result


def gated_backward(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    ends: torch.Tensor,
    form: GatedForm,
    order: torch.Tensor | None,
    weights: torch.Tensor | None,
    grad_gate: torch.Tensor,
    grad_up: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients as in `reference.py`, laid out as gate and up; nothing is written past the last end. What it returns
    takes `grad`'s memory, which is read before."""
    num_rows, size = gate.shape
    grad_weights = _for_assignments(order)
    with torch.cuda.device_of(gate):
        traced(_gated_backward)[(num_rows,)](
            grad, gate, up, ends, order, weights, grad_gate, grad_up, grad, grad_weights, *gate.stride(), size,
            form.limit, form.alpha, ends.shape[0], form.activation, order is not None, _block(size),
        )  # fmt: skip
    return grad, grad_weights


def add_bias(
    rows: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, order: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """Sums as in `reference.py`."""
    (num_rows, size), count = rows.shape, ends.shape[0]
    width = triton.next_power_of_2(count)
    with torch.cuda.device_of(rows):
        traced(_add_bias)[(num_rows,)](
            rows, bias, ends, order, weights, size, count, width, order is not None, _block(size)
        )
    return rows


def bias_grad(
    grad: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor, order: torch.Tensor | None, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients as in `reference.py`."""
    (num_rows, size), count = grad.shape, ends.shape[0]
    of_bias, of_weights = torch.empty_like(bias), _for_assignments(order)
    with torch.cuda.device_of(grad):
        traced(_bias_grad)[(count, triton.cdiv(size, 64))](
            grad, ends, order, weights, of_bias, size, order is not None, 64, 64
        )
        if of_weights is not None:
            width = triton.next_power_of_2(count)
            traced(_bias_weights_grad)[(num_rows,)](
                grad, bias, ends, order, of_weights, size, count, width, _block(size)
            )
    return of_bias, of_weights


def _for_assignments(order: torch.Tensor | None) -> torch.Tensor | None:
    return None if order is None else order.new_empty(order.shape, dtype=torch.float32)


def product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """The products as in `reference.py`; nothing is written past the last end."""
    in_size, out_size = weight.shape[1:] if is_transposed else weight.shape[:0:-1]
    result = x.new_empty(x.shape[0], out_size)
    rows, columns, depth = (128, 128, 64) if x.itemsize == 2 else (64, 64, 32)
    count, num_columns = ends.shape[0], triton.cdiv(out_size, columns)
    num_tiles = triton.cdiv(x.shape[0], rows) + count
    strides = weight.stride() if not is_transposed else (weight.stride(0), weight.stride(2), weight.stride(1))
    with torch.cuda.device_of(x):
        traced(_product)[(num_tiles * num_columns,)](
            x, weight, result, ends, in_size, out_size, *strides, num_columns, count,
            triton.next_power_of_2(count), _precision(), rows, columns, depth, num_warps=8 if x.itemsize == 2 else 4,
            num_stages=3,
        )  # fmt: skip
    return result


def outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The products as in `reference.py`."""
    result = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    tile, depth = (128, 32) if left.itemsize == 2 else (64, 32)
    lefts, rights = triton.cdiv(left.shape[1], tile), triton.cdiv(right.shape[1], tile)
    with torch.cuda.device_of(left):
        traced(_outer)[(ends.shape[0] * lefts * rights,)](
            left, right, result, ends, left.shape[1], right.shape[1], lefts, rights, _precision(), tile, tile, depth,
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return result


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _block(size: int) -> int:
    return min(1024, int(triton.next_power_of_2(size)))
