"""torch's operators, asked for by several threads at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import disttrain.process_group._torch  # noqa: F401

NUM_THREADS = 4


@pytest.mark.usefixtures("threads_take_turns_often")
def test_all_threads_find_the_same_operator() -> None:
    """torch's C++ keeps the address of the first that it is given: of two, one would be freed."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::_foreach_")}
    fresh = torch._ops._OpNamespace("aten")
    together, found = threading.Barrier(NUM_THREADS), [dict[str, Any]() for _ in range(NUM_THREADS)]

    def ask(operators: dict[str, Any]) -> None:
        for name in sorted(names):
            together.wait()
            packet = getattr(fresh, name.removeprefix("aten::"))
            operators[name] = [getattr(packet, overload) for overload in packet.overloads()]

    threads = [threading.Thread(target=ask, args=(operators,)) for operators in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) > 50
    for name in names:
        for operators in zip(*(each[name] for each in found), strict=True):
            assert len({id(operator) for operator in operators}) == 1, name
