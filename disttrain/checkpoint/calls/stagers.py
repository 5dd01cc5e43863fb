"""torch's `async_stager=` and `async_checkpointer_type=`, which `async_save` accepts without needing them.

Values are always staged into memory that is shared with the writer process, pinned where there are GPUs, and kept for
the next save. Source: torch/distributed/checkpoint/staging.py and state_dict_saver.py.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class AsyncCheckpointerType(Enum):
    """The writer of an asynchronous save, as torch names it: here it is a process in either case."""

    THREAD = "thread"
    PROCESS = "process"


@dataclass
class StagingOptions:
    """torch's options for staging. Of these, `use_async_staging` alone says something here: that `async_save` returns
    an `AsyncSaveResponse`."""

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class DefaultStager:
    """The object to give as `async_stager=`."""

    def __init__(self, config: StagingOptions | None = None) -> None:
        self.config = config or StagingOptions()

    def close(self) -> None:
        """Does nothing: the stager keeps nothing."""


@dataclass
class AsyncSaveResponse:
    """The result of `async_save` with a stager that stages asynchronously: when the values may be changed, and when the
    save is whole."""

    staging_completion: Future[None]
    upload_completion: Future[Path | None]


def stages_asynchronously(stager: object) -> bool:
    """True if the stager asks for an `AsyncSaveResponse`; torch's own can, too."""
    config: Any = getattr(stager, "config", getattr(stager, "_config", None))
    return bool(getattr(config, "use_async_staging", False))
