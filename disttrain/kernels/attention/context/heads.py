"""Exchanges heads for positions: each rank computes some heads of the whole sequence, by whatever kernel serves that.

Heads of keys that are fewer than ranks go to each rank whose heads of queries they serve.

Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.kernels.attention.context.agreement import between_exchanges
from disttrain.kernels.attention.context.parts import Parts
from disttrain.kernels.attention.context.planning.heads_cut import kv_heads_of
from disttrain.kernels.attention.operator import attention_of_whole
from disttrain.kernels.attention.rules import Rule
from disttrain.mesh import DeviceMesh
from disttrain.process_group.functional import all_to_all_single, wait_tensor


def run_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Rule | None,
    scale: float | None,
    by: str | None,
    mesh: DeviceMesh,
    parts: Parts,
) -> torch.Tensor:
    """Attention of this rank's positions by an all-to-all there, and one back. Collective, and again in backward."""
    num_ranks, own_rank = parts.num_ranks, mesh.get_local_rank()
    each = query.shape[1] // num_ranks
    heads = [range(rank * each, (rank + 1) * each) for rank in range(num_ranks)]
    kv_heads = [kv_heads_of(rank, key.shape[1], num_ranks) for rank in range(num_ranks)]
    outgoing = [
        [_of_heads(query, its_heads), _of_heads(key, its_kv_heads), _of_heads(value, its_kv_heads)]
        for its_heads, its_kv_heads in zip(heads, kv_heads, strict=True)
    ]
    shapes = [[(*tensor.shape[:2], size, tensor.shape[3]) for tensor in outgoing[own_rank]] for size in parts.sizes]
    coming = _exchanged(outgoing, shapes, mesh)
    order = parts.order_of_joined(query.device)
    whole_query, whole_key, whole_value = (
        torch.cat([tensors[number] for tensors in coming], 2).index_select(2, order) for number in range(3)
    )
    rule = None if mask is None else mask.local(slice(0, query.shape[0]), slice(own_rank * each, (own_rank + 1) * each))
    with between_exchanges(mesh.get_group()):
        result = attention_of_whole(whole_query, whole_key, whole_value, rule, scale, by)
    back = [[parts.take(result, rank, 2)] for rank in range(num_ranks)]
    shape = (query.shape[0], each, query.shape[2], value.shape[3])
    returned = _exchanged(back, [[shape]] * num_ranks, mesh)
    return torch.cat([tensors[0] for tensors in returned], 1)


def _exchanged(
    outgoing: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], mesh: DeviceMesh
) -> list[list[torch.Tensor]]:
    """Sends each rank its tensors, all in one all-to-all; what comes has `shapes`, by the ranks that send it."""
    flat = torch.cat([tensor.reshape(-1) for tensors in outgoing for tensor in tensors])
    sent = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    sizes = [[_numel(shape) for shape in each] for each in shapes]
    received = wait_tensor(all_to_all_single(flat, [sum(each) for each in sizes], sent, mesh))
    pieces = iter(received.split([size for each in sizes for size in each]))
    return [[next(pieces).view(shape) for shape in each] for each in shapes]


def _of_heads(tensor: torch.Tensor, heads: range) -> torch.Tensor:
    return tensor.narrow(1, heads.start, len(heads))


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
