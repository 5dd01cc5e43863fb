"""torch's store has no password: what it says of ours is a hint, not a proof."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from disttrain.errors import StoreAuthError
from disttrain.process_group.joining.beside_torch import open_beside
from disttrain.store import new_token, spawn_server, write_token


class TorchStore:
    """What ranks use of torch's store."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def wait(self, keys: list[str], _timeout: timedelta) -> None:
        assert set(keys) <= self._values.keys()

    def get(self, key: str) -> bytes:
        return self._values[key].encode()


def test_ranks_meet_there_and_a_jobs_token_stays_unsaid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = write_token(tmp_path / "token")
    monkeypatch.setenv("DISTTRAIN_TOKEN_FILE", str(tmp_path / "token"))
    torch_store = TorchStore()
    first = open_beside(torch_store, "127.0.0.1", 0, "place", 20.0)
    second = open_beside(torch_store, "127.0.0.1", 1, "place", 20.0)
    first.set("a", "1")
    assert second.get("a") == b"1"
    assert token not in torch_store.get("place").decode()
    second.close()
    first.close()


def test_a_token_told_there_does_not_replace_the_jobs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_token(tmp_path / "token")
    monkeypatch.setenv("DISTTRAIN_TOKEN_FILE", str(tmp_path / "token"))
    strangers_token = new_token()
    stranger = spawn_server("127.0.0.1", 0, strangers_token)
    torch_store = TorchStore()
    place = {"host": "127.0.0.1", "port": stranger.port, "token": strangers_token}
    torch_store.set("place", json.dumps(place))
    with pytest.raises(StoreAuthError, match="token is not the server's"):
        open_beside(torch_store, "127.0.0.1", 1, "place", 20.0)
    stranger.close()
