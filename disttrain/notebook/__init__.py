"""Ranks from a notebook's cell, or from any Python that runs already: `disttrain.launch(function, nproc=2)`.

Ranks are forks of this process. So they know all that it knows: functions and classes of cells, data that is loaded,
arguments of any kind; nothing is pickled, and no file has to be written first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.notebook.launching import launch as launch

__getattr__, __dir__, __all__ = lazily(__name__)
