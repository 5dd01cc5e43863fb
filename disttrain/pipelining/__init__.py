"""Pipelines: schedules as data, proven and drawn before they run.

    schedule = make_schedule("ZBV", num_ranks=8, num_microbatches=32)
    verify(lowered := lower(schedule))
    print(draw_text(simulate(lowered)))

All of this does without torch; each name is fetched from its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disttrain.pipelining.action import Action as Action
    from disttrain.pipelining.action import Op as Op
    from disttrain.pipelining.action import parse_action as parse_action
    from disttrain.pipelining.catalogue import make_schedule as make_schedule
    from disttrain.pipelining.costs import Costs as Costs
    from disttrain.pipelining.costs import Link as Link
    from disttrain.pipelining.csv_form import from_csv as from_csv
    from disttrain.pipelining.csv_form import to_csv as to_csv
    from disttrain.pipelining.liveness import Peak as Peak
    from disttrain.pipelining.liveness import peaks as peaks
    from disttrain.pipelining.passes.lower import lower as lower
    from disttrain.pipelining.pictures.svg import draw_svg as draw_svg
    from disttrain.pipelining.pictures.text import draw_text as draw_text
    from disttrain.pipelining.pictures.trace import chrome_trace as chrome_trace
    from disttrain.pipelining.placement import Placement as Placement
    from disttrain.pipelining.schedule import Schedule as Schedule
    from disttrain.pipelining.schedule import Wiring as Wiring
    from disttrain.pipelining.schedules.forward_only import forward_only as forward_only
    from disttrain.pipelining.searching.search import search as search
    from disttrain.pipelining.simulator import simulate as simulate
    from disttrain.pipelining.timeline import Timeline as Timeline
    from disttrain.pipelining.verifier import find_problems as find_problems
    from disttrain.pipelining.verifier import verify as verify

_MODULE_OF = {
    "Action": "action",
    "Costs": "costs",
    "Link": "costs",
    "Op": "action",
    "Peak": "liveness",
    "Placement": "placement",
    "Schedule": "schedule",
    "Timeline": "timeline",
    "Wiring": "schedule",
    "chrome_trace": "pictures.trace",
    "draw_svg": "pictures.svg",
    "draw_text": "pictures.text",
    "find_problems": "verifier",
    "forward_only": "schedules.forward_only",
    "from_csv": "csv_form",
    "lower": "passes.lower",
    "make_schedule": "catalogue",
    "parse_action": "action",
    "peaks": "liveness",
    "search": "searching.search",
    "simulate": "simulator",
    "to_csv": "csv_form",
    "verify": "verifier",
}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'disttrain.pipelining' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"disttrain.pipelining.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
