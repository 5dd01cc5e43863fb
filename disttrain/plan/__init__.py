"""Plans a mesh: lists every way to lay a Llama on so many GPUs, what each takes, and why one is the best.

    job = Job(PRESETS["70b"], num_gpus=64, hardware=HARDWARE["h100"])
    for plan in find_plans(job).plans:
        print(plan.choice, plan.memory.total_bytes, plan.times.step_s)

Nothing is run and no torch is loaded: memory is counted tensor by tensor (`model/memory.py`), bytes on the wire
collective by collective (`time/traffic.py`), times follow from the hardware's attained rates (`time/times.py`), and a
pipeline's bubble is the simulator's. `python -m disttrain.plan` prints it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.plan.job import Choice as Choice
    from disttrain.plan.job import Job as Job
    from disttrain.plan.job import MeshSizes as MeshSizes
    from disttrain.plan.model.experts import ExpertAssumptions as ExpertAssumptions
    from disttrain.plan.model.experts import ExpertSizes as ExpertSizes
    from disttrain.plan.model.experts import LatentAttention as LatentAttention
    from disttrain.plan.model.memory import Memory as Memory
    from disttrain.plan.model.memory import memory_of as memory_of
    from disttrain.plan.model.named import PRESETS as PRESETS
    from disttrain.plan.model.named import preset_named as preset_named
    from disttrain.plan.model.read import read_sizes as read_sizes
    from disttrain.plan.model.sizes import LlamaSizes as LlamaSizes
    from disttrain.plan.search import Plan as Plan
    from disttrain.plan.search import Plans as Plans
    from disttrain.plan.search import find_plans as find_plans
    from disttrain.plan.search import plan_of as plan_of
    from disttrain.plan.time.hardware import HARDWARE as HARDWARE
    from disttrain.plan.time.hardware import Hardware as Hardware
    from disttrain.plan.time.times import Times as Times
    from disttrain.plan.time.traffic import Traffic as Traffic
    from disttrain.plan.time.traffic import traffic_of as traffic_of

__getattr__, __dir__, __all__ = lazily(__name__)
