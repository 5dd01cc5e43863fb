"""Inductor's compiled C++, of which the text is known: kept from one run of the tests to the next."""

from __future__ import annotations

import getpass
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def link_kernels(source: Path, target: Path) -> None:
    """Puts the compiled kernels of one of Inductor's caches into another as well.

    Not those that are still being written: who loads half a library dies of SIGBUS, without a word. Inductor has a
    folder beside each library from before its linker begins until it has ended well. Its locks do not tell: they are
    of one cache, and gone with a process whose compiler goes on.
    """
    for file in source.glob("??/*.so"):
        if file.with_name(f"{file.stem}_CxxBuild").exists():
            continue
        (target / file.parent.name).mkdir(exist_ok=True)
        with suppress(OSError):  # it is there already, or files cannot have two names
            os.link(file, target / file.parent.name / file.name)


def share_headers(temporary: Path) -> None:
    """Has processes with this folder for temporary files find Inductor's compiled headers where all others do.

    They lie below that folder, wherever the cache does.
    """
    with suppress(KeyError, OSError):  # a user without a name
        shared = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        shared.mkdir(exist_ok=True)
        (temporary / shared.name).symlink_to(shared)
