"""`python -m disttrain.plan`: see `cli`."""

from __future__ import annotations

import sys

from disttrain.plan.cli import main

if __name__ == "__main__":
    sys.exit(main())
