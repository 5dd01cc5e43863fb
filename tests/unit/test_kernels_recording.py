"""What a graph reads is there as long as the graph, also where a cache has let go of it."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from disttrain.kernels.attention import flex
from disttrain.kernels.attention.rules import SlidingWindow
from disttrain.kernels.recording import kept_for_graph, recording


class Table:
    """As a tensor that may be gone."""


def test_a_graph_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with recording(torch.zeros(1, dtype=torch.int64)) as graph:
        table = kept_for_graph(Table(), torch.device("cuda"))
        gone = ref(table)
        assert not graph.kept
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        kept_for_graph(table, torch.device("cpu"))
        assert not graph.kept
        assert kept_for_graph(table, torch.device("cuda")) is table
    del table
    gc.collect()
    assert gone() is not None
    graph.kept.clear()
    gc.collect()
    assert gone() is None


def test_rules_of_an_attention_outlive_the_cache_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "prepare", lambda *_: Table())
    kept, is_capturing = flex._Kept(), [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    query: Any = SimpleNamespace(shape=(1, 1, 128, 16), device=torch.device("cuda", 0), is_cuda=True)
    kept.prepared(SlidingWindow(1), query, 128)
    with recording(torch.zeros(1, dtype=torch.int64)) as graph:
        is_capturing[0] = True
        gone = ref(kept.prepared(SlidingWindow(1), query, 128))
        is_capturing[0] = False
    for size in range(2, 40):
        kept.prepared(SlidingWindow(size), query, 128)
    gc.collect()
    assert gone() is not None
    del graph
    gc.collect()
    assert gone() is None
