"""FSDP2: per-parameter sharding of modules, with torch.distributed.fsdp's names.

Each name is fetched from its module when it is first used: the planner has the rules of `transfers/forms.py` without
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.fsdp2.estimating.estimate import Estimate as Estimate
    from disttrain.fsdp2.estimating.estimate import Traffic as Traffic
    from disttrain.fsdp2.estimating.estimate import estimate as estimate
    from disttrain.fsdp2.module import FSDPModule as FSDPModule
    from disttrain.fsdp2.module import UnshardHandle as UnshardHandle
    from disttrain.fsdp2.module import register_fsdp_forward_method as register_fsdp_forward_method
    from disttrain.fsdp2.module import share_comm_ctx as share_comm_ctx
    from disttrain.fsdp2.policies import CPUOffloadPolicy as CPUOffloadPolicy
    from disttrain.fsdp2.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
    from disttrain.fsdp2.policies import OffloadPolicy as OffloadPolicy
    from disttrain.fsdp2.policies import TransferPolicy as TransferPolicy
    from disttrain.fsdp2.shard_module import fully_shard as fully_shard
    from disttrain.fsdp2.transfers.forms import TransferCost as TransferCost

__getattr__, __dir__, __all__ = lazily(__name__)
