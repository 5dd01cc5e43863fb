"""NCCL: CUDA tensors over NVLink, InfiniBand or TCP."""

from __future__ import annotations

import torch

from disttrain.process_group import _c10d
from disttrain.process_group.backends.base import Membership
from disttrain.process_group.backends.c10d_backend import C10dBackend
from disttrain.process_group.work import TransportWork


class NcclBackend(C10dBackend):
    devices = ("cuda",)

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self._transport = _c10d.make_nccl(
            self._store,
            membership.rank,
            membership.size,
            membership.timeout_s,
            membership.ranks,
            membership.name,
        )

    def barrier(self, device: torch.device) -> TransportWork:
        return self._barrier([device.index])

    @classmethod
    def is_available(cls) -> bool:
        return _c10d.nccl_is_available()
