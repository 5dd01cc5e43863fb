"""The only file that calls CUDA's driver, for what torch lacks: streams that wait for a number, and write one.

CUDA driver API, "Stream Memory Operations": no kernel runs, so no core is taken while a stream waits.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ, by the sign of the difference
_AFTER_ALL_WRITES = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what the stream has written before is seen before
_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


def wait_for_number(stream: torch.cuda.Stream, address: int, number: int) -> None:
    """Let `stream` go on once the 32-bit number at `address` is at least `number`. Raises: RuntimeError."""
    _check(
        "cuStreamWaitValue32",
        _driver().cuStreamWaitValue32_v2(
            ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(number), _GREATER_OR_EQUAL
        ),
    )


def write_number(stream: torch.cuda.Stream, address: int, number: int) -> None:
    """Write a 32-bit number when `stream` comes here. Raises: RuntimeError."""
    _check(
        "cuStreamWriteValue32",
        _driver().cuStreamWriteValue32_v2(
            ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(number), _AFTER_ALL_WRITES
        ),
    )


def show_to_devices(address: int, num_bytes: int) -> None:
    """Let GPUs address this memory of the host's, under the same address. Raises: RuntimeError."""
    cudart: Any = torch.cuda.cudart()
    _check("cudaHostRegister", int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE_AND_MAPPED)))


def hide_from_devices(address: int) -> None:
    """The inverse, before the memory is let go of."""
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(address)


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"CUDA's driver cannot be loaded: {error}") from error


def _check(call: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{call} failed with code {code}")
