"""FSDP2: per-parameter sharding of modules, with torch.distributed.fsdp's names."""

from __future__ import annotations

from disttrain.fsdp2.fully_shard import FSDPModule, fully_shard
from disttrain.fsdp2.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"]
