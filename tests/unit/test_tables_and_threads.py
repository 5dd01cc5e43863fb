"""Tables of what is alive are read by one thread while others add to them: no reading fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from weakref import ref

import pytest

from disttrain.dtensor.spec import layout
from disttrain.flight_recorder.record.ring.descriptions import Descriptions


class _Kept(SimpleNamespace):
    """What can be referred to weakly."""


def read_while_others_add(read: Callable[[], object], add: Callable[[int], object]) -> None:
    has_read = threading.Event()

    def adding() -> None:
        alive = []
        for number in range(1_000_000):
            alive.append(add(number))
            if len(alive) > 2_000:
                alive.clear()
            if has_read.is_set():
                return

    thread = threading.Thread(target=adding)
    thread.start()
    try:
        for _ in range(300):
            read()
    finally:
        has_read.set()
        thread.join()


@pytest.mark.usefixtures("threads_take_turns_often")
def test_plans_are_forgotten_while_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = type(layout._SPECS)()
    monkeypatch.setattr(layout, "_SPECS", specs)

    def add(number: int) -> object:
        spec = _Kept(plans={})
        specs[number] = ref(spec, lambda _: specs.pop(number))  # type: ignore[index,assignment]  # any key and value do
        return spec

    read_while_others_add(layout.forget_plans, add)


@pytest.mark.usefixtures("threads_take_turns_often")
def test_recorded_steps_are_listed_while_others_are_recorded() -> None:
    descriptions = Descriptions(SimpleNamespace())  # type: ignore[arg-type]  # nothing is written

    def add(_: int) -> object:
        listing = _Kept()
        descriptions.keep_for(listing)
        return listing

    read_while_others_add(lambda: descriptions.listings, add)
