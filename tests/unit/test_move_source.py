"""What a file of Python becomes: statements, uses, and what is left."""

from __future__ import annotations

import ast
import importlib
import textwrap
from pathlib import Path

import pytest

from disttrain.lazy_names import absent_names
from disttrain.move import move_source
from disttrain.move.modules import LEFT, MODULES, PAGES
from disttrain.move.names import names_of

ROOT = Path(__file__).parents[2]


def _moved(text: str) -> str:
    """The new text of what leaves nothing, which a second move leaves alone."""
    moved = move_source(textwrap.dedent(text))
    assert moved.findings == ()
    assert move_source(moved.text) == moved
    assert moved.told == ()
    return moved.text


def _left(text: str) -> list[tuple[int, str, str]]:
    moved = move_source(textwrap.dedent(text))
    again = move_source(moved.text)
    assert again.text == moved.text
    return [(one.line, one.what, one.why) for one in moved.findings]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch.distributed as dist\n", "import disttrain as dist\n"),
        ("from torch import distributed as dist\n", "import disttrain as dist\n"),
        ("from torch import distributed\n", "import disttrain as distributed\n"),
        ("from torch import nn, distributed as d\n", "from torch import nn\nimport disttrain as d\n"),
        ("import torch.distributed.checkpoint as dcp\n", "import disttrain.checkpoint as dcp\n"),
        ("from torch.distributed import checkpoint as dcp\n", "from disttrain import checkpoint as dcp\n"),
        ("from torch.distributed import checkpoint\n", "from disttrain import checkpoint\n"),
        ("import os, torch.distributed as dist\n", "import os\nimport disttrain as dist\n"),
        (
            "import torch.distributed._functional_collectives as funcol\n",
            "import disttrain.process_group.functional as funcol\n",
        ),
        (
            "from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy as P\n",
            "from disttrain.fsdp2 import fully_shard, MixedPrecisionPolicy as P\n",
        ),
        (
            "from torch.distributed.distributed_c10d import _get_default_group\n",
            "from disttrain import _get_default_group\n",
        ),
        (
            "from torch.distributed import fsdp, all_reduce\n",
            "from disttrain import fsdp2 as fsdp\nfrom disttrain import all_reduce\n",
        ),
        (
            "from torch.distributed.tensor.parallel import (  # cut\n    ColwiseParallel,  # by columns\n)\n",
            "from disttrain.tp import (  # cut\n    ColwiseParallel,  # by columns\n)\n",
        ),
        (
            "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n",
            "from disttrain.checkpoint import dcp_to_torch_save\n",
        ),
        (
            "from torch.distributed._tensor.device_mesh import init_device_mesh\n",
            "from disttrain import init_device_mesh\n",
        ),
        (
            "from torch.distributed.fsdp._fully_shard import fully_shard\n",
            "from disttrain.fsdp2 import fully_shard\n",
        ),
        (
            "from torch.distributed._composable.fsdp import fully_shard\n",
            "from disttrain.fsdp2 import fully_shard\n",
        ),
        ("x = 1; import torch.distributed as dist; y = 2\n", "x = 1; import disttrain as dist; y = 2\n"),
        (
            "def f():\n    from torch import nn, distributed\n",
            "def f():\n    from torch import nn\n    import disttrain as distributed\n",
        ),
        ("import torch.distributed as dist\r\nx = 1\r\n", "import disttrain as dist\r\nx = 1\r\n"),
        ("from torch import nn\nx = 'no distributed'\n", "from torch import nn\nx = 'no distributed'\n"),
    ],
)
def test_statements(before: str, after: str) -> None:
    assert _moved(before) == after


def test_what_only_type_checkers_see_moves_too() -> None:
    before = "if TYPE_CHECKING:\n    from torch.distributed.device_mesh import DeviceMesh\n"
    assert _moved(before) == "if TYPE_CHECKING:\n    from disttrain import DeviceMesh\n"


def test_uses_of_torch_itself_bring_an_import() -> None:
    before = '''
        """What torch.distributed is for."""
        from __future__ import annotations

        import torch

        def total(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
            "ä"; torch.distributed.all_reduce(x, torch.distributed.ReduceOp.SUM)
            torch.distributed.tensor.parallel.parallelize_module(x)
            return torch.distributed
    '''
    after = '''
        """What torch.distributed is for."""
        from __future__ import annotations

        import disttrain
        import torch

        def total(x: torch.Tensor, group: disttrain.ProcessGroup) -> None:
            "ä"; disttrain.all_reduce(x, disttrain.ReduceOp.SUM)
            disttrain.tp.parallelize_module(x)
            return disttrain
    '''
    assert _moved(before) == textwrap.dedent(after)


def test_an_import_of_the_whole_name_keeps_torch_where_it_is_used() -> None:
    before = "import torch.distributed\n\nx = torch.ones(1)\ntorch.distributed.barrier()\n"
    assert _moved(before) == "import torch\nimport disttrain\n\nx = torch.ones(1)\ndisttrain.barrier()\n"
    before = "import torch\nimport torch.distributed\n\nx = torch.ones(1)\ntorch.distributed.barrier()\n"
    after = "import torch\nimport disttrain\n\nx = torch.ones(1)\ndisttrain.barrier()\n"
    assert _moved(before) == after


def test_an_import_comes_before_the_first_use() -> None:
    before = (
        "# A script.\ntry:\n    import torch\n    torch.distributed.barrier()\nfinally:\n    import os\nimport re\n"
    )
    after = before.replace("torch.distributed", "disttrain").replace("try:", "import disttrain\ntry:")
    assert _moved(before) == after


def test_an_import_that_is_there_already_goes() -> None:
    before = "import torch.distributed\nimport torch.distributed.tensor\n\ntorch.distributed.barrier()\n"
    assert _moved(before) == "import disttrain\n\ndisttrain.barrier()\n"


def test_what_is_ours_already_leaves_nothing() -> None:
    text = (
        "import torch\nimport disttrain\n\ntorch.optim.SGD(torch.nn.Linear(1, 1))\ndisttrain.checkpoint.save({}, 'a')\n"
    )
    assert _moved(text) == text


def test_prose_may_speak_of_torch() -> None:
    text = 'raise RuntimeError("torch.distributed is not initialised")\n'
    assert _moved(text) == text


def test_an_import_in_a_function_is_for_that_function() -> None:
    before = "def f():\n    import torch.distributed\n    torch.distributed.barrier()\n"
    assert _moved(before) == "def f():\n    import disttrain\n    disttrain.barrier()\n"


def test_uses_of_other_names_for_modules() -> None:
    before = """
        import torch as th
        import torch.distributed as dist
        import torch.distributed.tensor as dt

        th.distributed.barrier()
        dist.barrier(dist.group.WORLD)
        dist.distributed_c10d._get_default_group()
        dist.tensor.parallel.ColwiseParallel()
        dist.checkpoint.state_dict.get_state_dict()
        dt.Shard(0), dt.parallel.RowwiseParallel()
    """
    after = """
        import disttrain
        import torch as th
        import disttrain as dist
        import disttrain.dtensor as dt

        disttrain.barrier()
        dist.barrier(dist.group.WORLD)
        dist._get_default_group()
        dist.tp.ColwiseParallel()
        dist.checkpoint.get_state_dict()
        dt.Shard(0), disttrain.tp.RowwiseParallel()
    """
    assert _moved(before) == textwrap.dedent(after)


def test_names_that_functions_bind_are_theirs() -> None:
    before = """
        import torch.distributed as dist

        def nearest(dist):
            return dist.tensor.parallel, (lambda dist: dist.argmin)(0)

        def far():
            dist = 3
            return dist.tensor.debug

        def other(x=dist.tensor.parallel):
            def inner(dist): ...
            return dist.tensor.parallel
    """
    after = before.replace("torch.distributed", "disttrain")
    after = after.replace("x=dist.tensor.parallel", "x=dist.tp").replace(
        "...\n            return dist.tensor.parallel", "...\n            return dist.tp"
    )
    assert _moved(before) == textwrap.dedent(after)


def test_a_statement_of_which_a_part_stays() -> None:
    before = """
        if True:
            from torch.distributed.fsdp import (  # both
                FullyShardedDataParallel as FSDP,
                fully_shard,
            )
    """
    after = """
        if True:
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            from disttrain.fsdp2 import fully_shard  # both
    """
    assert move_source(textwrap.dedent(before)).text == textwrap.dedent(after)
    left = [(4, "torch.distributed.fsdp.FullyShardedDataParallel", "FSDP1, which FSDP2 replaces")]
    assert _left(before) == left


def test_what_is_left_stays_torchs_in_the_file() -> None:
    before = "import torch.distributed\ntorch.distributed.barrier()\ntorch.distributed.rpc.init_rpc('a')\n"
    moved = move_source(before)
    after = "import disttrain\nimport torch.distributed\ndisttrain.barrier()\ntorch.distributed.rpc.init_rpc('a')\n"
    assert moved.text == after
    assert [(one.line, one.what, one.page) for one in moved.findings] == [
        (3, "torch.distributed.rpc", "docs/moving_over.md")
    ]


def test_what_is_asked_of_a_name_that_is_ours_now() -> None:
    before = """
        import torch.distributed as dist
        from torch.distributed import *
        dist.shrink_group([1])
        patch("torch.distributed.all_reduce")
    """
    assert _left(before) == [
        (3, "torch.distributed.*", "Which names are meant is not said: write them out"),
        (4, "dist.shrink_group", absent_names()["disttrain", "shrink_group"]),
        (5, '"torch.distributed.all_reduce"', "A name in a string is not changed"),
    ]


def test_what_was_left_is_told_again() -> None:
    before = """
        import torch.distributed as dist
        from torch.distributed import fsdp

        dist.shrink_group([1]), dist.fsdp.ShardingStrategy.FULL_SHARD
        fsdp.MixedPrecision()
        dist.barrier()
    """
    first = move_source(textwrap.dedent(before))
    second = move_source(first.text)
    assert second.text == first.text
    assert [one.why for one in first.findings] == [one.why for one in second.findings]
    assert [(one.line, one.what) for one in second.findings] == [
        (5, "dist.fsdp.ShardingStrategy"),
        (5, "dist.shrink_group"),
        (6, "fsdp.MixedPrecision"),
    ]


def test_what_knows_nothing_of_groups_or_takes_ours_stays() -> None:
    text = """
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.distributed.algorithms.join import Join
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.distributed.checkpoint.state_dict import _init_optim_state
        import torch.distributed.nn.functional as functional
    """
    assert _moved(text) == textwrap.dedent(text)


def test_what_stays_is_asked_of_torch_itself() -> None:
    before = """
        import torch.distributed as dist
        from torch.distributed import tensor

        def f(x):
            return dist.nn.functional.all_gather(dist.get_rank()), dist.algorithms.join.Join
    """
    after = """
        import torch
        import disttrain as dist
        from disttrain import dtensor as tensor

        def f(x):
            return torch.distributed.nn.functional.all_gather(dist.get_rank()), torch.distributed.algorithms.join.Join
    """
    assert _moved(before) == textwrap.dedent(after)
    text = "import torch\nimport torch.distributed as dist\n\ndist.nn.all_gather(dist.get_rank())\n"
    after = "import torch\nimport disttrain as dist\n\ntorch.distributed.nn.all_gather(dist.get_rank())\n"
    assert _moved(text) == after


def test_groups_that_ddp_is_given_become_torchs() -> None:
    before = """
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        def cut(model, group, mesh, DDP2=DDP):
            DDP(model, process_group=group)
            DDP(model, process_group=None), DDP(model, device_ids=[0])
            torch.nn.parallel.DistributedDataParallel(model, 0, 0, 0, 1, torch.distributed.new_group([0]))
            return DDP(module=model, device_mesh=mesh["dp"])

        def other(DDP, group):
            return DDP(0, process_group=group)
    """
    after = """
        import disttrain
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        def cut(model, group, mesh, DDP2=DDP):
            DDP(model, process_group=disttrain.to_torch(group))
            DDP(model, process_group=None), DDP(model, device_ids=[0])
            torch.nn.parallel.DistributedDataParallel(model, 0, 0, 0, 1, disttrain.to_torch(disttrain.new_group([0])))
            return DDP(module=model, process_group=disttrain.to_torch(mesh["dp"].get_group()))

        def other(DDP, group):
            return DDP(0, process_group=group)
    """
    assert _moved(before) == textwrap.dedent(after)


@pytest.mark.parametrize("text", ["import torch.distributed as dist\nprint 'old'\n", "torch.distributed\0"])
def test_what_is_no_python_is_told(text: str) -> None:
    moved = move_source(text)
    assert moved.text == text
    assert [one.what for one in moved.findings] == ["the file"]


def test_each_name_that_is_not_here_is_told_with_its_reason() -> None:
    theirs = {ours: module for module, ours in reversed(MODULES.items())}
    theirs["disttrain"] = "torch.distributed"
    for (package, name), why in absent_names().items():
        if not name.isidentifier():  # a method, or an argument
            continue
        (finding,) = move_source(f"from {theirs[package]} import {name}\n").findings
        assert (finding.why, finding.page) == (why, PAGES[package]), name


def test_what_has_no_reason_is_told_too() -> None:
    assert _left("from torch.distributed.checkpoint import NoSuch, _private, _load\n") == [
        (1, "torch.distributed.checkpoint.NoSuch", "disttrain.checkpoint has no such name"),
        (1, "torch.distributed.checkpoint._load", "disttrain.checkpoint has load"),
        (1, "torch.distributed.checkpoint._private", "A private name of torch's"),
    ]


def test_names_are_those_that_packages_have() -> None:
    for package in set(MODULES.values()):
        module = importlib.import_module(package)
        names = names_of(package)
        assert set(module.__all__) - names <= {"__version__"}, package
        assert [name for name in names if not hasattr(module, name)] == []


def test_torch_has_these_modules() -> None:
    folder = Path(importlib.import_module("torch").__file__ or "").parent.parent
    for module in (*MODULES, *LEFT):
        path = folder.joinpath(*module.split("."))
        # Or by an old name, which torch keeps in sys.modules.
        assert path.is_dir() or path.with_suffix(".py").exists() or importlib.import_module(module), module


def test_pages_have_the_sections_that_are_named() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "disttrain" / "move").glob("*.py")]
    strings = [node.value for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    named = {one for one in strings if isinstance(one, str) and one.startswith("docs/")} | set(PAGES.values())
    named |= {reason.page for reason in LEFT.values()}
    for page, _, section in (one.partition("#") for one in named):
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        titles = {line[3:].lower().replace(".", "").replace(" ", "-") for line in lines if line.startswith("## ")}
        assert not section or section in titles, (page, section)
