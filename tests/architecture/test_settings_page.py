"""`docs/settings.md` is what the settings say of themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_page_is_up_to_date(root: Path) -> None:
    """After a change: `python -m disttrain.settings > docs/settings.md`."""
    made = subprocess.run([sys.executable, "-m", "disttrain.settings"], capture_output=True, text=True, check=True)
    assert (root / "docs" / "settings.md").read_text(encoding="utf-8") == made.stdout
