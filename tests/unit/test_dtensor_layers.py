"""Layers on DTensors: values and gradients are those of plain tensors, however operands lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from disttrain.dtensor import Placement, Replicate, Shard
from disttrain.testing import run_threads
from tests.cases.shardings import check, collectives_of, laid_out, mesh_of, normal

aten = torch.ops.aten

Case = tuple[Callable[..., Any], list[torch.Tensor]]

INDICES = torch.tensor([[0, 3, 6], [2, 2, 1]])
QUERY, KEY, VALUE = normal(3, 2, 5, 4), normal(3, 2, 6, 4, seed=1), normal(3, 2, 6, 4, seed=2)
ROWS, WEIGHT, BIAS = normal(5, 2, 3), normal(3, seed=2), normal(3, seed=3)
IMAGES = normal(3, 4, 5, 4)

LAYERS: dict[str, Case] = {
    "layer norm": (lambda x, w, b: functional.layer_norm(x, (3,), w, b), [ROWS, WEIGHT, BIAS]),
    "layer norm, bare": (lambda x: functional.layer_norm(x, (3,)), [ROWS]),
    "layer norm, two dims": (lambda x, w: functional.layer_norm(x, (2, 3), w), [normal(1, 2, 3), normal(2, 3)]),
    "group norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), [IMAGES, normal(4), normal(4, seed=4)]),
    "group norm, bare": (lambda x: functional.group_norm(x, 2), [normal(1, 4, 3)]),
    "convolution": (
        lambda x, w, b: functional.conv2d(x, w, b, padding=1),
        [IMAGES, normal(6, 4, 3, 3), normal(6)],
    ),
    "convolution in groups": (
        lambda x, w, b: functional.conv2d(x, w, b, stride=2, groups=2),
        [IMAGES, normal(6, 2, 3, 3), normal(6)],
    ),
    "convolution of one channel": (
        lambda x, w, b: functional.conv1d(x, w, b, padding=1),
        [normal(1, 1, 5), normal(1, 1, 3), normal(1)],
    ),
    "transposed convolution": (functional.conv_transpose2d, [IMAGES, normal(4, 2, 3, 3), normal(2)]),
    "embedding": (lambda w, i: functional.embedding(i, w), [normal(7, 4), INDICES]),
    "embedding, few rows": (
        lambda w, i: functional.embedding(i, w, padding_idx=2),
        [normal(3, 4), torch.tensor([0, 2, 2, 1, 1])],
    ),
    "embedding, by frequency": (
        lambda w, i: functional.embedding(i, w, scale_grad_by_freq=True),
        [normal(3, 4), torch.tensor([0, 2, 2, 1, 1])],
    ),
    "max pool": (lambda x: functional.max_pool2d(x, 2), [IMAGES]),
    "max pool without batch": (lambda x: functional.max_pool2d(x, 2), [IMAGES[0]]),
    "average pool": (lambda x: functional.avg_pool2d(x, 2), [IMAGES]),
    "adaptive average pool": (lambda x: functional.adaptive_avg_pool2d(x, (3, 2)), [IMAGES]),
    "adaptive max pool": (lambda x: functional.adaptive_max_pool2d(x, (3, 2)), [IMAGES]),
    "upsampling, nearest": (lambda x: functional.interpolate(x, scale_factor=2.0), [normal(5, 1, 3)]),
    "upsampling, linear": (
        lambda x: functional.interpolate(x, size=7, mode="linear", align_corners=True),
        [normal(5, 2, 3)],
    ),
    "upsampling, cubic": (
        lambda x: functional.interpolate(x, scale_factor=2.0, mode="bicubic"),
        [normal(2, 1, 2, 2)],
    ),
    "reflected border": (lambda x: functional.pad(x, (1, 2), mode="reflect"), [normal(5, 2, 4)]),
    "repeated border": (lambda x: functional.pad(x, (1, 2, 0, 1), mode="replicate"), [IMAGES]),
    "patches": (lambda x: functional.unfold(x, 2), [IMAGES]),
    "sum of patches": (lambda x: functional.fold(x, (3, 3), 2), [normal(5, 12, 4)]),
    "pixel shuffle": (lambda x: functional.pixel_shuffle(x, 2), [IMAGES]),
    "grid sample": (
        lambda x, grid: functional.grid_sample(x, grid, align_corners=False),
        [IMAGES, normal(3, 3, 3, 2).tanh()],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    function, operands = LAYERS[name]
    check(function, *operands, gradients=True, num_choices=3)


@pytest.mark.xfail(torch.__version__ < "2.12", reason="torch 2.11 says that sums of float64 are float32")
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention(is_causal: bool) -> None:
    def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)

    check(flash, QUERY, KEY, VALUE)
    out, sums = flash(QUERY, KEY, VALUE)
    check(
        lambda *operands: aten._scaled_dot_product_flash_attention_for_cpu_backward(*operands, 0.0, is_causal),
        *(normal(3, 2, 5, 4, seed=5), QUERY, KEY, VALUE, out, sums),
        may_be_partial=False,
        num_choices=12,
    )


@pytest.mark.parametrize("shape", [(5, 6), (3, 1, 5, 6), (1, 2, 1, 6)])
def test_attention_with_a_mask(shape: tuple[int, ...]) -> None:
    check(
        lambda query, key, value, mask: aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask
        )[0],
        *(QUERY, KEY, VALUE, normal(*shape)),
        may_be_partial=False,
    )


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 2), (4, 3), (2, 1, 3, 3)])
def test_batch_norm_of_the_whole_batch(shape: tuple[int, ...], is_training: bool) -> None:
    def normalized(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *running: torch.Tensor) -> Any:
        mean, variance = [statistic.detach().clone() for statistic in running]
        result = functional.batch_norm(x, mean, variance, weight, bias, is_training, momentum=0.3)
        return result, mean, variance

    num_channels = shape[1]
    statistics = [normal(num_channels, seed=6), normal(num_channels, seed=7).square()]
    check(
        normalized,
        *(normal(*shape), normal(num_channels), normal(num_channels, seed=5), *statistics),
        gradients=True,
    )


def test_batch_norm_keeps_statistics_in_32_bits() -> None:
    images = (normal(8, 3, 4) * 3 + 100).to(torch.bfloat16)
    weight, bias = normal(3).float(), normal(3, seed=1).float()
    running = [torch.zeros(3), torch.ones(3)]
    expected = functional.batch_norm(images, running[0], running[1], weight, bias, training=True)

    def body() -> None:
        mesh = mesh_of((2,))
        statistics = [laid_out(statistic, mesh, [Replicate()]) for statistic in (torch.zeros(3), torch.ones(3))]
        affine = [laid_out(values, mesh, [Replicate()]) for values in (weight, bias)]
        result = functional.batch_norm(laid_out(images, mesh, [Shard(0)]), *statistics, *affine, training=True)
        torch.testing.assert_close(result.full_tensor(), expected)
        for found, wanted in zip(statistics, running, strict=True):
            torch.testing.assert_close(found.to_local(), wanted)

    run_threads(2, body)


def test_an_index_past_a_cut_table_raises_on_all_ranks() -> None:
    def body() -> None:
        table = laid_out(normal(5, 2), mesh_of((2,)), [Shard(0)])
        with pytest.raises(IndexError, match="5 rows"):
            functional.embedding(laid_out(torch.tensor([1, 5]), table.device_mesh, [Replicate()]), table)

    run_threads(2, body)


R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.mark.parametrize(
    ("name", "placements"),
    [
        ("layer norm", (S0, R, R)),
        ("group norm", (S0, R, R)),
        ("convolution", (S0, R, R)),
        ("convolution", (R, S0, S0)),
        ("convolution", (S1, S1, R)),
        ("embedding", (S0, R)),
        ("embedding", (S1, R)),
        ("embedding", (R, S1)),
        ("max pool", (S1,)),
        ("upsampling, cubic", (S0,)),
        ("patches", (S0,)),
    ],
)
def test_cut_layers_move_nothing(name: str, placements: tuple[Placement, ...]) -> None:
    function, operands = LAYERS[name]

    def body() -> None:
        mesh = mesh_of((2,))
        given = [laid_out(operand, mesh, [placement]) for operand, placement in zip(operands, placements, strict=True)]
        assert collectives_of(lambda: function(*given)) == []

    run_threads(2, body)


def test_attention_by_heads_moves_nothing_and_batch_norm_twice() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        heads = [laid_out(whole, mesh, [Shard(1)]) for whole in (QUERY, KEY, VALUE)]
        assert collectives_of(lambda: aten._scaled_dot_product_flash_attention_for_cpu(*heads)) == []
        images = laid_out(IMAGES, mesh, [Shard(0)])
        found = collectives_of(lambda: functional.batch_norm(images, None, None, training=True))
        assert found == ["all_reduce", "all_reduce"]

    run_threads(2, body)


def test_a_fused_norm_is_no_optimizers_operator() -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        x, weight = normal(4, 6), normal(6, seed=1)
        expected = aten._fused_rms_norm(x, [6], weight, 1e-5)
        for placement in (Shard(0), Shard(1), Replicate()):
            cut, whole = laid_out(x, mesh, [placement]), laid_out(weight, mesh, [Replicate()])
            for found, wanted in zip(aten._fused_rms_norm(cut, [6], whole, 1e-5), expected, strict=True):
                torch.testing.assert_close(found.full_tensor(), wanted)

    run_threads(2, body)
