"""Who shares memory between GPUs: ranks of one host, but for those that NCCL is to take for several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import disttrain
from disttrain.process_group import ProcessGroup, new_group
from disttrain.process_group.peers import channels as peer_channels
from disttrain.process_group.peers import memory as peer_memory
from disttrain.testing import run_threads

GPU = torch.device("cuda", 0)


class HostOfRank:
    """NCCL_HOSTID, where each thread is a rank."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self) -> str:
        return self._name.format(rank=disttrain.get_rank())


class Made(Exception):
    """Somebody shares memory."""


def make(*_: object) -> None:
    raise Made


def memory(group: ProcessGroup) -> object:
    return peer_memory.peer_memory_of(group, GPU)


def channels(group: ProcessGroup) -> object:
    return peer_channels.open_channels(group, GPU, [], 0, 0)


@pytest.mark.parametrize("share", [memory, channels])
@pytest.mark.parametrize(("host", "is_one"), [("host{rank}", False), ("one", True)])
def test_ranks_that_nccl_takes_for_several_hosts_share_no_memory(
    monkeypatch: pytest.MonkeyPatch, share: Callable[[ProcessGroup], object], host: str, is_one: bool
) -> None:
    monkeypatch.setattr(peer_memory, "NCCL_HOSTID", HostOfRank(host))
    monkeypatch.setattr(peer_channels, "NCCL_HOSTID", HostOfRank(host))
    monkeypatch.setattr(peer_memory, "PeerMemory", make)
    monkeypatch.setattr(
        peer_channels, "SharedNumbers", type("Numbers", (), {"__new__": make, "make_file": lambda _: ""})
    )

    def body() -> bool:
        group = new_group([0, 1])
        assert isinstance(group, ProcessGroup)
        try:
            return share(group) is not None
        except Made:
            return True

    assert run_threads(2, body) == [is_one, is_one]
