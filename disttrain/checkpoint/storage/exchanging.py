"""Two folders change places in one step: renameat2(2) of Linux, which Python has no name for. Torch-free."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_IS_NOT_THERE: Final = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
"""No such call, or not on this file system."""


def exchange(first: Path, second: Path) -> bool:
    """Have two folders change places. Returns False, with nothing done, where that cannot be. Raises OSError."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _IS_NOT_THERE:
        return False
    raise OSError(number, os.strerror(number), str(second))
