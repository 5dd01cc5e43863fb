"""Which transport serves which device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import disttrain
from disttrain.errors import BackendError
from disttrain.process_group.backends import BACKENDS, Backend, Membership, choose_backends, register_backend
from disttrain.process_group.backends.fake import FakeBackend
from disttrain.store import HashStore


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    before = dict(BACKENDS)
    yield
    BACKENDS.clear()
    BACKENDS.update(before)


def test_all_that_the_machine_has() -> None:
    chosen = choose_backends(None)
    assert chosen["cpu"] is BACKENDS["gloo"]
    assert ("cuda" in chosen) == BACKENDS["nccl"].is_available()


def test_by_name() -> None:
    assert choose_backends("gloo") == {"cpu": BACKENDS["gloo"]}
    assert choose_backends("cpu:fake,cuda:fake") == dict.fromkeys(("cpu", "cuda"), BACKENDS["fake"])


@pytest.mark.parametrize(
    ("wanted", "rule"),
    [("glooo", "no backend 'glooo'"), ("cuda:gloo", "does not serve device 'cuda'"), ("cpu:", "no backend ''")],
)
def test_what_cannot_be_is_refused(wanted: str, rule: str) -> None:
    with pytest.raises(BackendError, match=rule):
        choose_backends(wanted)


class LoopbackBackend(FakeBackend):
    """Somebody else's transport."""

    devices = ("cpu",)


def test_a_registered_backend_serves() -> None:
    register_backend("loopback", LoopbackBackend)
    register_backend("loopback", LoopbackBackend)
    assert choose_backends("cpu:loopback") == {"cpu": LoopbackBackend}
    world = disttrain.World(HashStore(), 0, 2, backend="loopback", timeout_s=1)
    with disttrain.entered_world(world):
        gathered = torch.zeros(2)
        disttrain.all_gather_into_tensor(gathered, torch.ones(1))
        assert gathered.tolist() == [1.0, 1.0]
        assert (disttrain.get_backend(), disttrain.get_backend_config()) == ("loopback", "cpu:loopback")


def test_an_entry_point_is_loaded_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "theirs-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[disttrain.backends]\ntheirs = their_transport:TheirBackend\nbroken = their_transport:missing\n"
    )
    (tmp_path / "their_transport.py").write_text(
        "from disttrain.process_group.backends.fake import FakeBackend\n"
        "class TheirBackend(FakeBackend):\n    devices = ('cpu',)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "their_transport" not in sys.modules
    with pytest.raises(BackendError, match=r"Known are broken, fake, gloo, .*theirs"):
        choose_backends("nobodys")
    (backend,) = choose_backends("theirs").values()
    assert backend.__module__ == "their_transport"
    with pytest.raises(BackendError, match="'broken' of their_transport:missing cannot be loaded: AttributeError"):
        choose_backends("broken")


@pytest.mark.parametrize(
    ("name", "backend", "rule"),
    [
        ("gloo", FakeBackend, "there is a backend 'gloo' already"),
        ("my:own", FakeBackend, "is no name"),
        ("dictionary", dict, "not a subclass of Backend"),
    ],
)
def test_what_cannot_be_registered(name: str, backend: type, rule: str) -> None:
    with pytest.raises(BackendError, match=rule):
        register_backend(name, backend)


def test_what_a_backend_lacks_is_said() -> None:
    class Small(LoopbackBackend):
        gather = Backend.gather

    membership = Membership("few", 0, (0,), HashStore(), 1.0, 0)
    with pytest.raises(BackendError, match="gather: backend 'small' does not have it"):
        Small(membership).gather(torch.ones(1), [torch.ones(1)], 0, False)
