"""Stores that a program brings itself: derived from ours, or torch's, which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed

import disttrain
from disttrain.errors import SettingError


class Dictionary(disttrain.Store):
    """As programs write one for torch: what comes is bytes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: disttrain.store.Value) -> None:
        assert isinstance(value, bytes)
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def compare_set(self, key: str, expected: disttrain.store.Value, desired: disttrain.store.Value) -> bytes:
        assert isinstance(expected, bytes)
        assert isinstance(desired, bytes)
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return self.values.get(key, expected)


@pytest.mark.parametrize("prefix", ["", "p/"])
def test_what_it_lacks_is_done_with_what_it_has(prefix: str) -> None:
    own = Dictionary()
    store = disttrain.PrefixStore(prefix[:-1], own) if prefix else own
    assert not store.has_extended_api()
    store.append("a", b"po")
    store.append("a", "tato" if prefix else b"tato")
    store.append("a", b"tato")
    store.multi_set(["b", "c"], ["1", b"2"] if prefix else [b"1", b"2"])
    assert own.values == {f"{prefix}a": b"potatotato", f"{prefix}b": b"1", f"{prefix}c": b"2"}
    assert store.multi_get(["c", "a"]) == [b"2", b"potatotato"]
    assert store.timeout_s == 300
    store.set_timeout(2)
    assert own.timeout_s == 2
    store.close()


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("get", "a"),
        ("append", ("a", b"b")),
        ("multi_get", (["a"],)),
        ("multi_set", (["a"], [b"b"])),
        ("wait", (["a"],)),
    ],
)
def test_what_it_cannot_is_said(method: str, arguments: tuple[object, ...]) -> None:
    store = disttrain.PrefixStore("p", disttrain.Store())
    with pytest.raises(NotImplementedError, match=r"Not implemented\. Store has no such method"):
        getattr(store, method)(*arguments)


def test_others_are_told_whose_they_are() -> None:
    theirs: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    nothing: Any = None
    with pytest.raises(SettingError, match=r"PrefixStore: store is a torch\..*HashStore, which is none of"):
        disttrain.PrefixStore("p", theirs)
    with pytest.raises(ValueError, match="store is None, which is none of"):
        disttrain.PrefixStore("p", nothing)
    with pytest.raises(SettingError, match=r"init_process_group: store is a torch\..*HashStore, which is none of"):
        disttrain.init_process_group(store=theirs, rank=0, world_size=1)
    assert not disttrain.is_initialized()


def test_the_store_below_all_prefixes() -> None:
    store = disttrain.HashStore()
    twice = disttrain.PrefixStore("a", disttrain.PrefixStore("b", store))
    assert twice._underlying_non_prefix_store is store
    assert isinstance(twice, disttrain.Store)
    assert isinstance(store.clone(), disttrain.Store)
    assert twice.has_extended_api()
