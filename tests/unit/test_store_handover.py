"""Stores that are handed to another process: which can be, and what it opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain.errors import StoreError
from disttrain.store import FileStore, HashStore, PrefixStore
from disttrain.store.connection.handover import store_from_plain, store_to_plain


def test_a_file_under_prefixes(tmp_path: Path) -> None:
    ours = PrefixStore("a", PrefixStore("b", FileStore(str(tmp_path / "store"))))
    theirs = store_from_plain(store_to_plain(ours))
    ours.set("key", "value")
    assert theirs.get("key") == b"value"


def test_a_store_of_one_process_is_refused() -> None:
    with pytest.raises(StoreError, match="no other process can use a HashStore"):
        store_to_plain(PrefixStore("a", HashStore()))
