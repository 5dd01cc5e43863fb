"""Which pipeline this rank is in, and with which ranks it shares experts: groups of both libraries."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed
from pipelines.model import Exchange
from torch.distributed import _functional_collectives as torch_functional

import disttrain
from disttrain.process_group import ProcessGroup, functional
from disttrain.process_group.peers.channels import PeerChannels, open_channels

_NUM_SLOTS = 2


class Ranks:
    """Neighbouring ranks share experts; those at the same place among them are a pipeline.

    Of ours each stage of a rank has a group for its experts, since NCCL runs the collectives of one group in the order
    in which they were called, and so those of two stages one after the other; `one_group`: all stages have the same.
    With `copied_bytes`, of the largest part that one rank sends another, copy engines carry ours in place of NCCL.
    Collective: every rank.
    """

    def __init__(self, num_expert_ranks: int, device: torch.device, *, one_group: bool, copied_bytes: int) -> None:
        rank, size = disttrain.get_rank(), disttrain.get_world_size()
        self.num_expert_ranks = num_expert_ranks
        self.pipeline_rank, self.pipeline_size = rank // num_expert_ranks, size // num_expert_ranks
        pipelines = [list(range(first, size, num_expert_ranks)) for first in range(num_expert_ranks)]
        sharing = [list(range(first, first + num_expert_ranks)) for first in range(0, size, num_expert_ranks)]
        # torch's groups are made by all ranks, ours by their members.
        self.pipeline_groups = {
            "torch": [torch.distributed.new_group(ranks) for ranks in pipelines][rank % num_expert_ranks],
            "ours": disttrain.new_group(pipelines[rank % num_expert_ranks]),
        }
        own = sharing[self.pipeline_rank]
        self._torchs = [torch.distributed.new_group(ranks) for ranks in sharing][self.pipeline_rank]
        groups = [disttrain.new_group(own) for _ in range(1 if one_group else 2)]
        self._ours = [_exchange_over(group, device, copied_bytes) for group in groups]

    def exchange(self, library: str, local_stage: int) -> Exchange | None:
        """For the experts of this rank's stage number `local_stage`; None: there are none."""
        if self.num_expert_ranks == 1:
            return None
        if library == "torch":
            return self._by_torch
        return self._ours[local_stage % len(self._ours)]

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        splits = [len(x) // self.num_expert_ranks] * self.num_expert_ranks
        return torch_functional.all_to_all_single_autograd(x, splits, splits, self._torchs)


def _exchange_over(group: ProcessGroup, device: torch.device, copied_bytes: int) -> Exchange:
    if not copied_bytes:
        return partial(functional.all_to_all_single, output_split_sizes=None, input_split_sizes=None, group=group)
    ranks = range(group.group_size)
    pairs = [(source, target) for source in ranks for target in ranks if source != target]
    channels = open_channels(group, device, pairs, copied_bytes, _NUM_SLOTS)
    if channels is None:
        raise RuntimeError("the GPUs cannot reach each other's memory.")
    return partial(_Copied.apply, channels, group)


class _Copied(torch.autograd.Function):
    """An exchange of equal parts by copy engines; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, channels: PeerChannels, group: ProcessGroup, x: torch.Tensor) -> torch.Tensor:
        ctx.way = channels, group
        return _copied(channels, group, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, _copied(*ctx.way, grad.contiguous())


def _copied(channels: PeerChannels, group: ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    found, own = torch.empty_like(x), group.group_rank
    parts, places = x.chunk(group.group_size), found.chunk(group.group_size)
    others = [rank for rank in range(group.group_size) if rank != own]
    sent = [channels.send(parts[rank], rank) for rank in others]
    places[own].copy_(parts[own])
    for rank in others:
        channels.receive(places[rank], rank).wait()
    for work in sent:
        # So that the memory of what was sent may be used again.
        work.wait()
    return found
