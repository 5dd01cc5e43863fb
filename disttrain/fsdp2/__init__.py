"""FSDP2: per-parameter sharding of modules, with torch.distributed.fsdp's names."""

from __future__ import annotations

from disttrain.fsdp2.estimating.estimate import Estimate, Traffic, estimate
from disttrain.fsdp2.fully_shard import fully_shard
from disttrain.fsdp2.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from disttrain.fsdp2.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, TransferPolicy
from disttrain.fsdp2.transfers.forms import TransferCost
from disttrain.lazy_names import answering

__all__ = [
    "CPUOffloadPolicy",
    "Estimate",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Traffic",
    "TransferCost",
    "TransferPolicy",
    "UnshardHandle",
    "estimate",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

__getattr__ = answering(__name__)
