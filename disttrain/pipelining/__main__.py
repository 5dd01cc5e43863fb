"""`python -m disttrain.pipelining`: see `cli`."""

from __future__ import annotations

import sys

from disttrain.pipelining.cli import main

if __name__ == "__main__":
    sys.exit(main())
