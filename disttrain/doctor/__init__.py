"""Checks whether this machine, and these nodes, are fit for a job; `disttrain-launch doctor` runs it.

Each rank's facts about its machine (`machine.py`) and the ranks' measurements (`network.py`) become findings
(`findings.py`). Rank 0 collects these through the store, so that there is a report even if the network does not work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.doctor.findings import Finding as Finding
    from disttrain.doctor.findings import State as State
    from disttrain.doctor.machine import Machine as Machine
    from disttrain.doctor.machine import examine as examine
    from disttrain.doctor.machine import look as look

__getattr__, __dir__, __all__ = lazily(__name__)
