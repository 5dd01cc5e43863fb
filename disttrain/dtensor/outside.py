"""The methods by which a tensor's memory leaves torch: to other processes and libraries.

A DTensor has no memory, only its part has. torch's own methods would read address 0 and crash the process.
"""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch

from disttrain.dtensor.spec.layout import Spec
from disttrain.errors import LayoutError


class Outside:
    """Answers for a DTensor in place of torch's methods that access memory."""

    _local_tensor: torch.Tensor
    _spec: Spec

    def share_memory_(self) -> Self:
        """Move this rank's part to memory that forked processes share."""
        self._local_tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """True where this rank's part is in such memory, or on a GPU."""
        return bool(self._local_tensor.is_shared())

    def is_pinned(self, *device: Any) -> bool:
        """True where this rank's part is in memory that GPUs read by themselves."""
        return bool(self._local_tensor.is_pinned(*device))

    def __dlpack__(self, **_: Any) -> NoReturn:
        self._refuse("__dlpack__", "other libraries know no DTensor", "Give them to_local(), or full_tensor().")

    def __dlpack_device__(self) -> NoReturn:
        self.__dlpack__()

    def apply_(self, _: Any) -> NoReturn:
        self._refuse("apply_", "it calls Python for each element of a memory", "Call it on to_local().")

    def map_(self, *_: Any) -> NoReturn:
        self._refuse("map_", "it calls Python for each element of a memory", "Call it on to_local().")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse(
            "pickle",
            "a DTensor is one rank's part of a tensor, and means nothing to another process",
            "Save with disttrain.checkpoint, or pickle full_tensor().",
        )

    def __create_write_items__(self, fqn: str, _: Any) -> NoReturn:
        """Answers torch.distributed.checkpoint, which asks tensors by this name what of them to write."""
        remedy = "Save with disttrain.checkpoint.save, or in torch's format with disttrain.checkpoint.interop.save_dcp."
        self._refuse(
            "torch.distributed.checkpoint.save", f"it is torch's, and {fqn!r} is a DTensor of disttrain's", remedy
        )

    def __create_chunk_list__(self) -> NoReturn:
        """As above: where to read."""
        self._refuse(
            "torch.distributed.checkpoint.load",
            f"it is torch's, and is to load a DTensor of disttrain's, of shape {tuple(self._spec.shape)}",
            "Load with disttrain.checkpoint.interop.load_dcp, which reads torch's saves.",
        )

    def _refuse(self, operation: str, problem: str, remedy: str) -> NoReturn:
        raise LayoutError(operation, f"{problem}.", remedy, rank=self._spec.mesh.get_rank())
