"""`python -m disttrain_launch` is `disttrain-launch`."""

from __future__ import annotations

import sys

from disttrain_launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
