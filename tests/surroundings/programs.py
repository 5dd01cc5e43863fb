"""Programs of others that some tests run the real thing of."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str, package: str) -> str:
    """Its path; skips the test where it is not installed. `package`: Debian's."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if found is None:
        pytest.skip(f"there is no {name} here (Debian: apt-get install {package})")
    return found


def needs_root(why: str) -> None:
    if os.geteuid() != 0:
        pytest.skip(f"only root can {why}")
