"""Is this machine, and are these nodes, fit for a job? `disttrain-launch doctor` asks, and says what to do.

What each rank sees of its own machine (`machine.py`) and what they measure together (`network.py`) become findings
(`findings.py`), which rank 0 collects through the store, so that it can tell even of a network that does not work.
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
