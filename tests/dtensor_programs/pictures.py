"""Steps on what lies on grids of one to three dims: pooled, resized, padded, shuffled and convolved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.dtensor_programs.draw import Draw, Value

F = "torch.nn.functional."
RESIZED = {
    1: "nearest nearest-exact linear area",
    2: "nearest nearest-exact bilinear bicubic area",
    3: "nearest nearest-exact trilinear area",
}


def picture(draw: Draw, num_dims: int) -> Value:
    """Batch, channels and a grid of so many dims: one that is there, or a new one."""

    def suits(value: Value) -> bool:
        return value.is_float and value.ndim == num_dims + 2 and value.tensor.dtype != torch.bfloat16

    value = draw.pick(suits)
    if value is not None and draw.random.random() < 0.8:
        return value
    channels = draw.random.choice((1, 2, 4, 4) if num_dims < 3 else (1, 2))
    grid = tuple(draw.random.choice((2, 3, 4, 5) if num_dims < 3 else (2, 3)) for _ in range(num_dims))
    shape = (draw.random.choice((1, 2, 3)), channels, *grid)
    return draw.leaf(shape, draw.random.choice((torch.float64, torch.float64, torch.float32)))


def pool(draw: Draw) -> None:
    num_dims = draw.random.choice((1, 2, 2, 3))
    x = picture(draw, num_dims)
    kind = draw.name("max avg adaptive_avg adaptive_max lp unpool")
    options: dict[str, Any] = {"stride": draw.random.choice((1, 2)), "padding": draw.random.choice((0, 1))}
    size = draw.random.choice((2, 3))
    if kind == "avg":
        counts = draw.random.random() < 0.5
        draw.do(f"{F}avg_pool{num_dims}d", x, size, **options, count_include_pad=counts, rounds=True)
    elif kind == "max":
        dilation = draw.random.choice((1, 1, 2))
        draw.do(f"{F}max_pool{num_dims}d", x, size, **options, dilation=dilation)
    elif kind == "lp" and num_dims < 3:
        draw.do(f"{F}lp_pool{num_dims}d", x, 2, size, rounds=True)
    elif kind == "unpool":
        pooled = draw.do(f"{F}max_pool{num_dims}d", x, 2, return_indices=True)
        if pooled:
            draw.values = [value for value in draw.values if value is not pooled[1]]
            draw.do(f"{F}max_unpool{num_dims}d", *pooled, 2, output_size=x.shape[2:])
    else:
        sizes = tuple(draw.random.choice((1, 2, 3)) for _ in range(num_dims))
        draw.do(f"{F}{kind}_pool{num_dims}d", x, sizes, rounds=kind != "adaptive_max")


def resize(draw: Draw) -> None:
    num_dims = draw.random.choice((1, 2, 2, 3))
    x = picture(draw, num_dims)
    mode = draw.name(RESIZED[num_dims])
    options: dict[str, Any] = {"mode": mode}
    if mode.endswith(("linear", "cubic")):
        options["align_corners"] = draw.random.random() < 0.5
        options["antialias"] = mode.startswith("bi") and draw.random.random() < 0.3
    if draw.random.random() < 0.5:
        options["scale_factor"] = draw.random.choice((0.5, 1.5, 2.0))
    else:
        options["size"] = tuple(draw.random.choice((1, 2, 3, 5)) for _ in range(num_dims))
    draw.do(F + "interpolate", x, **options, rounds=True)


def frame(draw: Draw) -> None:
    num_dims = draw.random.choice((1, 2, 2, 3))
    x = picture(draw, num_dims)
    widths = tuple(draw.random.choice((0, 1, 1)) for _ in range(2 * num_dims))
    draw.do(F + "pad", x, widths, draw.name("reflect replicate circular"))


def shuffle(draw: Draw) -> None:
    x = picture(draw, 2)
    kind = draw.name("pixel_shuffle pixel_unshuffle channel_shuffle unfold fold grid_sample local_response_norm")
    if kind == "unfold":
        options = {"padding": draw.random.choice((0, 1)), "stride": draw.random.choice((1, 2))}
        for columns in draw.do(F + kind, x, 2, **options):
            if draw.random.random() < 0.5:
                draw.do(F + "fold", columns, x.shape[2:], 2, **options)
    elif kind == "fold":
        draw.do(F + kind, draw.exactly((x.shape[0], 4 * x.shape[1], 4), x.tensor.dtype), (3, 3), 2)
    elif kind == "grid_sample":
        grid = draw.exactly((x.shape[0], 2, draw.random.choice((1, 3)), 2), x.tensor.dtype)
        mode, padding = draw.name("bilinear nearest bicubic"), draw.name("zeros border reflection")
        draw.do(F + kind, x, grid, mode, padding, draw.random.random() < 0.5, rounds=True)
    elif kind == "local_response_norm":
        draw.do(F + kind, x, 3, rounds=True)
    else:
        draw.do(F + kind, x, 2)


def convolve(draw: Draw) -> None:
    num_dims = draw.random.choice((1, 2, 2, 3))
    x = picture(draw, num_dims)
    dtype, channels = x.tensor.dtype, x.shape[1]
    groups = draw.random.choice([one for one in (1, 1, 2, max(channels, 1)) if channels % one == 0])
    kernel = tuple(draw.random.choice((1, 2, 3)) for _ in range(num_dims))
    options = {"stride": draw.random.choice((1, 2)), "padding": draw.random.choice((0, 1)), "groups": groups}
    options["dilation"] = draw.random.choice((1, 1, 2))
    is_turned = draw.random.random() < 0.4
    if not _leaves_some(x.shape[2:], kernel, options, is_turned=is_turned):
        return
    num_outputs = groups * draw.random.choice((1, 2))
    bias = draw.exactly((num_outputs,), dtype) if draw.random.random() < 0.5 else None
    if not is_turned:
        weight = draw.exactly((num_outputs, channels // groups, *kernel), dtype)
        draw.do(f"{F}conv{num_dims}d", x, weight, bias, **options, rounds=True)
    else:
        weight = draw.exactly((channels, num_outputs // groups, *kernel), dtype)
        draw.do(f"{F}conv_transpose{num_dims}d", x, weight, bias, **options, rounds=True)


def _leaves_some(grid: Sequence[int], kernel: Sequence[int], options: dict[str, int], *, is_turned: bool) -> bool:
    """Whether something comes out: where nothing does, some of torch's ways to compute raise."""
    margin, stride = 2 * options["padding"], options["stride"]
    reaches = [options["dilation"] * (size - 1) for size in kernel]
    if is_turned:
        return all((size - 1) * stride - margin + reach >= 0 for size, reach in zip(grid, reaches, strict=True))
    return all(size + margin > reach for size, reach in zip(grid, reaches, strict=True))


FAMILIES = {pool: 2, resize: 2, frame: 1, shuffle: 2, convolve: 2}
