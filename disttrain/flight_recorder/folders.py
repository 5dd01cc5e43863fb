"""Where rings and dumps lie when DISTTRAIN_FLIGHT_DIR names no folder. Torch-free."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def private_folder() -> Path:
    """This user's own on this machine; it need not be there."""
    return Path(tempfile.gettempdir(), f"disttrain-flight-{os.getuid()}")
