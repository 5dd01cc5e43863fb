"""Sums of rows of a table: features may be cut, and the vocabulary, where each rank adds up the rows that it holds.

Beside the sums come tables for the backward pass, of which kernels leave out what they happen not to need. Here they
are the same on all devices: the bag of each index, the number of rows that count in each bag, and, for maxima, whose
row it was.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from disttrain.dtensor.rules.axis_map import operand_called, operand_names
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, Signature, all_replicated
from disttrain.dtensor.rules.parts import cutting_axes, operand_part, result_part
from disttrain.dtensor.spec.placement import Partial, Replicate, Shard

_SUM_MODE, _MEAN_MODE, _MAX_MODE = 0, 1, 2
_SUM, _WHOLE = Partial("sum"), Replicate()


def _mode(call: OpCall) -> int:
    return int(call.argument("mode", _SUM_MODE))


def _outputs(call: OpCall) -> tuple[torch.Tensor, ...]:
    sums, bag_of_index, sizes, _ = call.outputs
    indices = operand_called(call, "indices")
    num_indices = 0 if indices is None else indices.shape[0]
    max_indices = sizes.new_empty(sums.shape if _mode(call) == _MAX_MODE else (0,))
    return sums, bag_of_index.new_empty(num_indices), sizes.new_empty(sums.shape[0]), max_indices


def bags(call: OpCall) -> list[Signature]:
    signatures = [all_replicated(call)]
    if None in call.operands[:2] or call.argument("sparse", False):
        return signatures
    others = [_WHOLE] * (len(call.operands) - 1)
    is_max = _mode(call) == _MAX_MODE
    signatures.append(Signature.of((Shard(1), *others), Shard(1), _WHOLE, _WHOLE, Shard(1) if is_max else _WHOLE))
    if not is_max:
        signatures.append(Signature.of((Shard(0), *others), _SUM, _WHOLE, _WHOLE, _WHOLE))
    return signatures + _batches(call)


def _batches(call: OpCall) -> list[Signature]:
    """Equal bags, whose offsets are plain: where indices are cut so that no bag is, each rank has bags of its own."""
    indices, num_bags = operand_called(call, "indices"), call.outputs[0].shape[0]
    if indices is None or operand_called(call, "offsets") is not None:
        return []
    mesh = indices.layout.mesh
    axes = [axis for axis, placement in enumerate(indices.placements) if placement == Shard(0)]
    if num_bags % math.prod(mesh.shape[axis] for axis in axes):
        return []
    cut = [_WHOLE if name in ("weight", "offsets") else Shard(0) for name in operand_names(call)]
    of_max_indices = Shard(0) if _mode(call) == _MAX_MODE else _WHOLE
    return [Signature(tuple(cut), (Shard(0), Shard(0), Shard(0), of_max_indices), only_axis=axis) for axis in axes]


def _localize(call: OpCall, propagation: Propagation) -> Compute:
    table = operand_part(call, propagation, 0)
    is_cut = bool(cutting_axes(table.layout, {0}))
    num_own, first = table.local_shape[0], table.local_offset[0]
    is_mean = _mode(call) == _MEAN_MODE
    sums = result_part(call, propagation)
    num_bags, first_bag = sums.local_shape[0], sums.local_offset[0]
    is_part = num_bags < sums.shape[0]

    def compute(*args: Any, **keywords: Any) -> Any:
        by_name = dict(zip(call.facts.arguments, args, strict=False)) | keywords
        weight, indices, offsets = by_name["weight"], by_name["indices"], by_name["offsets"]
        padding = by_name.get("padding_idx", -1)
        if is_part:
            offsets = by_name["offsets"] = offsets[:num_bags]
        bag_of_index = torch.arange(indices.numel(), device=indices.device)
        bag_of_index = torch.bucketize(bag_of_index, offsets[:num_bags], right=True) - 1
        counts = (indices != padding).to(torch.int64)
        sizes = counts.new_zeros(num_bags).index_add_(0, bag_of_index, counts)
        if not is_cut:
            sums, _, _, max_indices = call.op(**by_name)
        else:
            local_indices = indices - first
            is_absent = (local_indices < 0) | (local_indices >= num_own) | (indices == padding)
            # A row of zeros stands for what others hold.
            rows = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
            sums, _, _, max_indices = call.op(
                rows,
                local_indices.masked_fill(is_absent, num_own),
                offsets,
                per_sample_weights=by_name.get("per_sample_weights"),
                include_last_offset=by_name.get("include_last_offset", False),
            )
            if is_mean:
                sums = sums / sizes.clamp(min=1).unsqueeze(-1)
        is_max = _mode(call) == _MAX_MODE
        return sums, bag_of_index + first_bag, sizes, max_indices if is_max else sizes.new_empty(0)

    return compute


def bags_backward(call: OpCall) -> list[Signature]:
    """The gradient of the table, for which the features may be cut."""
    names = operand_names(call)
    is_max = _mode(call) == _MAX_MODE
    cut = [Shard(1) if name == "grad" or (is_max and name == "maximum_indices") else _WHOLE for name in names]
    linear = [_SUM if name == "grad" else _WHOLE for name in names]
    signatures = [all_replicated(call), Signature.of(cut, Shard(1)), Signature.of(linear, _SUM)]
    if call.argument("scale_grad_by_freq", False):
        return signatures
    by_bags = [
        _WHOLE if name == "offsets" or (name == "maximum_indices" and not is_max) else Shard(0) for name in names
    ]
    return signatures + [Signature(tuple(by_bags), (_SUM,), only_axis=axis) for axis in _axes_of_bags(call)]


def _axes_of_bags(call: OpCall) -> list[int]:
    """The axes along which the forward has cut between bags."""
    bag_of_index = operand_called(call, "offset2bag")
    placements = () if bag_of_index is None else bag_of_index.placements
    return [axis for axis, placement in enumerate(placements) if placement == Shard(0)]


def _of_own_bags(call: OpCall, propagation: Propagation) -> Compute:
    """Bags are counted from the first that this rank has."""
    names = operand_names(call)
    first_bag = operand_part(call, propagation, names.index("grad")).local_offset[0]
    if not first_bag:
        return call.op
    position = call.facts.arguments.index("offset2bag")

    def compute(*args: Any, **keywords: Any) -> Any:
        counted = args[position] - first_bag
        return call.op(*args[:position], counted, *args[position + 1 :], **keywords)

    return compute


def weights_backward(call: OpCall) -> list[Signature]:
    """The gradient of each index's weight is a product of rows, of which each rank has its features."""
    names = operand_names(call)
    cut = [Shard(1) if name in ("grad", "weight") else _WHOLE for name in names]
    by_bags = tuple(_WHOLE if name in ("weight", "offsets") else Shard(0) for name in names)
    batches = [Signature(by_bags, (Shard(0),), only_axis=axis) for axis in _axes_of_bags(call)]
    return [all_replicated(call), Signature.of(cut, _SUM), *batches]


_BAGS = Rule(bags, _localize, outputs=_outputs, takes_blocks=False)

RULES = {
    "aten._embedding_bag": _BAGS,
    "aten._embedding_bag_backward": Rule(bags_backward, _of_own_bags),
    "aten._embedding_bag_dense_backward": Rule(bags_backward, _of_own_bags),
    "aten._embedding_bag_forward_only": _BAGS,
    "aten._embedding_bag_per_sample_weights_backward": Rule(weights_backward, _of_own_bags),
}
