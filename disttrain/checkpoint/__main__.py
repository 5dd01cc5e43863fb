"""`python -m disttrain.checkpoint`: see `cli`."""

from __future__ import annotations

import sys

from disttrain.checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
