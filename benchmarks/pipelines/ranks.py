"""Which pipeline this rank is in, and with which ranks it shares experts: groups of both libraries."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed
from pipelines.model import Exchange
from torch.distributed import _functional_collectives as torch_functional

import disttrain
from disttrain.process_group import functional


class Ranks:
    """Neighbouring ranks share experts; those at the same place among them are a pipeline.

    Of ours each stage of a rank has a group for its experts, since NCCL runs the collectives of one group in the order
    in which they were called, and so those of two stages one after the other; `one_group`: all stages have the same.
    Collective: every rank.
    """

    def __init__(self, num_expert_ranks: int, *, one_group: bool) -> None:
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
        self._ours = [disttrain.new_group(own) for _ in range(1 if one_group else 2)]

    def exchange(self, library: str, local_stage: int) -> Exchange | None:
        """For the experts of this rank's stage number `local_stage`; None: there are none."""
        if self.num_expert_ranks == 1:
            return None
        if library == "torch":
            return self._by_torch
        group = self._ours[local_stage % len(self._ours)]
        return partial(functional.all_to_all_single, output_split_sizes=None, input_split_sizes=None, group=group)

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        splits = [len(x) // self.num_expert_ranks] * self.num_expert_ranks
        return torch_functional.all_to_all_single_autograd(x, splits, splits, self._torchs)
