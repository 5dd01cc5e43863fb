"""A tensor that a collective is still filling: whatever reads it waits first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from disttrain.process_group._c10d import without_torch_function, wrapping
from disttrain.process_group._torch import dispatches
from disttrain.process_group.work import Work


@dispatches
class AsyncCollectiveTensor(torch.Tensor):
    """The result of a functional collective in eager mode: shape and dtype are known, values come.

    Every operator that takes it waits once and works on the plain tensor; the results are plain tensors. Asking for
    its shape, dtype or device does not wait.
    """

    __slots__ = ("_inner", "_work")
    _inner: torch.Tensor
    _work: Work | None

    __torch_function__ = without_torch_function

    @staticmethod
    def __new__(cls, inner: torch.Tensor, work: Work | None) -> Self:
        made: Self = wrapping(cls, inner)
        made._inner = inner
        made._work = work
        return made

    def wait(self) -> torch.Tensor:
        """The plain tensor, once its values are there (CUDA: once the current stream is ordered after them).

        Raises: CollectiveTimeoutError, BackendError, as the collective does.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._inner

    def is_completed(self) -> bool:
        """True when the values are there; never waits."""
        return self._work is None or self._work.is_completed()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation is that of a static method
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not kwargs:
            return func(*settled(args))
        return func(*settled(args), **dict(zip(kwargs, settled(kwargs.values()), strict=True)))

    def tolist(self) -> Any:
        return self.wait().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.wait().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # the stubs mean the same
        state = "there" if self.is_completed() else "under way"
        return f"AsyncCollectiveTensor({tuple(self.shape)}, {self.dtype}, {state})"

    @property
    def settled_inner(self) -> torch.Tensor:
        """The plain tensor, which a compiled function takes in place of this one; waits for it."""
        return self.wait()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["settled_inner"], None

    def _stable_hash_for_caching(self) -> str:
        # torch's name for the other facts that a compiled function depends on: none beside the inner tensor.
        return type(self).__name__

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, size: torch.Size, stride: tuple[int, ...]
    ) -> AsyncCollectiveTensor:
        return AsyncCollectiveTensor(inner["settled_inner"], None)


def settled(values: Any) -> tuple[Any, ...]:
    """`values` with plain tensors, waited for, in the place of asynchronous ones; also in lists among them."""
    return tuple(
        value.wait()
        if type(value) is AsyncCollectiveTensor
        else type(value)(settled(value))
        if type(value) in (list, tuple)
        else value
        for value in values
    )
