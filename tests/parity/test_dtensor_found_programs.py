"""Programs on DTensors that once differed from plain torch, as `python -m tests.dtensor_programs` found them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from disttrain.dtensor import Partial, Replicate, Shard
from tests.dtensor_programs.alone import WrittenProgram, backward, differences, gradient
from tests.dtensor_programs.program import Leaf


def a_number_copied_into_partial(leaf: Any, redistribute: Any) -> list[Any]:
    results = []
    for reduce_op in ("sum", "avg", "max", "product"):
        value = leaf(Leaf((3,), torch.float64, 1), (Partial(reduce_op),))
        results += [value, value.copy_(0.25), value.copy_(2)]
    return results


def a_sum_of_one_element_over_no_dims(leaf: Any, redistribute: Any) -> list[Any]:
    value = leaf(Leaf((1, 1), torch.float64, 1, requires_grad=True), (Shard(1),))
    norm = torch.linalg.vector_norm(value, float("-inf"), None, True)
    sums = [value.sum([], keepdim=True), value.amax((), keepdim=True), value.logsumexp((0,), keepdim=True)]
    return [*sums, norm, gradient(norm, [value], False)]


def norms_of_inputs_without_gradients(leaf: Any, redistribute: Any) -> list[Any]:
    results = []
    for placements in ((Partial(),), (Shard(0),), (Shard(2),)):
        value = leaf(Leaf((4, 3, 7), torch.float64, 1), placements)
        weight = leaf(Leaf((3, 7), torch.float64, 2, requires_grad=True), (Replicate(),))
        channels = leaf(Leaf((3,), torch.float64, 3, requires_grad=True), (Replicate(),))
        outputs = [
            functional.layer_norm(value, (3, 7), weight),
            functional.rms_norm(value, (3, 7), weight),
            functional.group_norm(value, 3, channels),
            functional.batch_norm(value, None, None, channels, channels, True),
        ]
        results += [[output, gradient(output.mul(value), [weight, channels], False)] for output in outputs]
    return results


def a_batch_norm_of_16_bits_with_fewer_channels_than_ranks(leaf: Any, redistribute: Any) -> list[Any]:
    value = leaf(Leaf((4, 1, 3), torch.bfloat16, 1), (Shard(1),))
    weight = leaf(Leaf((1,), torch.bfloat16, 2, requires_grad=True), (Shard(0),))
    output = functional.batch_norm(value, None, None, weight, None, True)
    return [output, gradient(output, [weight], False)]


def a_write_to_what_lies_on_one_rank_and_is_viewed(leaf: Any, redistribute: Any) -> list[Any]:
    results = []
    for dim in (1, 2):
        value = leaf(Leaf((1, 2, 1), torch.float64, dim), (Shard(dim),))
        whole = redistribute(value, (Replicate(),))
        view = whole.view_as(value)
        results += [value, whole, view, whole.mul_(view)]
    return results


def a_gradient_that_one_of_a_list_has(leaf: Any, redistribute: Any) -> list[Any]:
    first = leaf(Leaf((2, 1), torch.float64, 1, requires_grad=True), (Shard(0),))
    other = leaf(Leaf((3,), torch.float64, 2, requires_grad=True), (Shard(0),))
    results = torch._foreach_abs([other, redistribute(first, (Replicate(),))])
    backward(results[0])
    return [first, other, *results]


def vectors_put_side_by_side_that_are_cut_and_partial(leaf: Any, redistribute: Any) -> list[Any]:
    cut = leaf(Leaf((3,), torch.float32, 1), (Shard(0), Partial("avg")))
    partial = leaf(Leaf((1,), torch.float32, 2), (Replicate(), Partial()))
    return [torch.cat([cut, partial]), torch.cat([partial, cut])]


def gradients_of_what_is_flat_in_place(leaf: Any, redistribute: Any) -> list[Any]:
    first = leaf(Leaf((4,), torch.float64, 1, requires_grad=True), (Shard(0),))
    other = leaf(Leaf((4,), torch.float64, 2, requires_grad=True), (Replicate(),))
    results = []
    for name in ("copysign_", "nextafter_", "gt_", "eq_"):
        written = getattr(first.mul(2), name)(other)
        results += [written, gradient(written, [first, other], False)]
    for written in (first.mul(2).sgn_(), first.mul(2).le_(0.5)):
        results += [written, gradient(written, [first], False)]
    return results


def a_sign_taken_from_what_is_written_to_later(leaf: Any, redistribute: Any) -> list[Any]:
    first, other = (leaf(Leaf((4,), torch.float64, seed, requires_grad=True), (Shard(0),)) for seed in (1, 2))
    result = first.copysign(other)
    with torch.no_grad():
        other.abs_()
    return [result, gradient(result, [first, other], False)]


def kernels_that_are_empty_on_some_ranks(leaf: Any, redistribute: Any) -> list[Any]:
    results = []
    for needs in ((True, False), (False, True), (True, True)):
        images = leaf(Leaf((1, 2, 1), torch.float64, 1, requires_grad=needs[0]), (Replicate(),))
        kernel = leaf(Leaf((2, 2, 1), torch.float64, 2, requires_grad=needs[1]), (Shard(2),))
        output = functional.conv1d(images, kernel)
        wanted = [tensor for tensor, is_needed in zip((images, kernel), needs, strict=True) if is_needed]
        results += [output, gradient(output, wanted, False)]
    return results


def norms_of_fewer_rows_than_ranks_in_16_bits(leaf: Any, redistribute: Any) -> list[Any]:
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        value = leaf(Leaf((1, 4), torch.bfloat16, 1, requires_grad=True), (Shard(0),))
        weight = leaf(Leaf((4,), dtype, 2, requires_grad=True), (Replicate(),))
        for output in (functional.layer_norm(value, (4,)), functional.group_norm(value, 2, weight)):
            results += [output, gradient(output, [value], False)]
    return results


FOUND: dict[WrittenProgram, tuple[int, ...]] = {
    a_number_copied_into_partial: (2,),
    a_sum_of_one_element_over_no_dims: (2,),
    norms_of_inputs_without_gradients: (2,),
    a_batch_norm_of_16_bits_with_fewer_channels_than_ranks: (2,),
    a_write_to_what_lies_on_one_rank_and_is_viewed: (1,),
    a_gradient_that_one_of_a_list_has: (2,),
    vectors_put_side_by_side_that_are_cut_and_partial: (2, 2),
    gradients_of_what_is_flat_in_place: (2,),
    a_sign_taken_from_what_is_written_to_later: (2,),
    kernels_that_are_empty_on_some_ranks: (3,),
    norms_of_fewer_rows_than_ranks_in_16_bits: (2,),
}


@pytest.mark.parametrize("program", FOUND, ids=lambda program: program.__name__)
def test_it_is_the_same(program: WrittenProgram) -> None:
    assert not differences(program, FOUND[program])
