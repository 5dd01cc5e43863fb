"""pytest: run a test's body on real ranks.

    @on_ranks(2, 3)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_all_reduce(dtype):
        ...                       # runs on every rank of a world of 2, then of 3 processes

Load it with `pytest_plugins = ["disttrain.testing.pytest_plugin"]`. A test on ranks is a module-level function; its
arguments must be values that `disttrain.process_group.calls.packing` can send.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from disttrain.testing.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The session's pool of rank processes."""
    with RankPool() as pool:
        yield pool


def on_ranks(
    *world_sizes: int, backend: str | None = None, timeout_s: float = 180.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test's body on every rank of a world of each of these sizes; values of fixtures are not passed on."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(rank_pool: RankPool, world_size: int, **arguments: Any) -> None:
            rank_pool.run(world_size, body, arguments, backend=backend, timeout_s=timeout_s)

        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("rank_pool", "world_size", *inspect.signature(body).parameters)
        ]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
        test.__module__ = body.__module__
        test.pytestmark = list(getattr(body, "pytestmark", []))  # type: ignore[attr-defined]
        test.on_rank = body  # type: ignore[attr-defined]
        parametrized: Callable[..., None] = pytest.mark.parametrize("world_size", world_sizes)(test)
        return parametrized

    return decorate
