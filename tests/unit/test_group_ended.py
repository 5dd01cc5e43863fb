"""A group that ends for another rank's mistake leaves nothing behind that the next call could wait on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import disttrain
from disttrain.errors import CollectiveMismatchError, GroupError
from disttrain.process_group.backends import BACKENDS, Membership
from disttrain.process_group.backends.fake import FakeBackend
from disttrain.store import HashStore

REASON = "rank 1 refused barrier: no."


class WatchedBackend(FakeBackend):
    """Calls `while_connecting` when it is made; counts how often it is given up."""

    devices = ("cpu",)
    while_connecting: Callable[[], object] = staticmethod(bool)
    num_aborted = 0

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        WatchedBackend.while_connecting()

    def abort(self) -> None:
        WatchedBackend.num_aborted += 1


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> disttrain.ProcessGroup:
    monkeypatch.setattr(WatchedBackend, "num_aborted", 0)
    monkeypatch.setitem(BACKENDS, "watched", WatchedBackend)
    return disttrain.World(HashStore(), 0, 2, backend="cpu:watched", timeout_s=1).default_group


def test_what_connects_while_it_ends_serves_no_call(
    group: disttrain.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchedBackend, "while_connecting", lambda: group.end(REASON))
    # It waited while the other refused; what is called later finds the group ended.
    with pytest.raises(CollectiveMismatchError, match=r"barrier: rank 1 refused barrier: no\. Mend that call"):
        group.backend("barrier", "cpu")
    with pytest.raises(GroupError, match=r"has ended: rank 1 refused barrier: no\. "):
        group.backend("barrier", "cpu")
    assert WatchedBackend.num_aborted == 1


def test_who_learns_that_it_has_ended_finds_no_backend(
    group: disttrain.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.backend("barrier", "cpu")
    found: list[str] = []

    def take_out() -> list[object]:
        found.append("still waits" if not scope.is_given_up else "goes on")
        return taken_out()

    scope, taken_out = group._scope, group._taken_out
    monkeypatch.setattr(group, "_taken_out", take_out)
    group.end(REASON)
    assert found == ["still waits"]
    with pytest.raises(GroupError, match="has ended"):
        group.backend_of("barrier", torch.ones(1))
