"""`python -m disttrain.move`: see `cli`."""

from __future__ import annotations

import sys

from disttrain.move.cli import main

if __name__ == "__main__":
    sys.exit(main())
