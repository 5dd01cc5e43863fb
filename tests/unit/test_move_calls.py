"""What `python -m disttrain.move` says of calls: arguments and methods that are not here, and of nothing else."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from disttrain import context_parallel
from disttrain.move import move_source
from disttrain.move.signatures import definition, takes

ROOT = Path(__file__).parents[2]


def _told(text: str) -> list[tuple[int, str]]:
    """What is told of a file, which a second time is told alike."""
    moved = move_source(textwrap.dedent(text))
    again = move_source(moved.text)
    assert again.text == moved.text
    assert [(one.line, one.why) for one in again.findings] == [(one.line, one.why) for one in moved.told]
    return [(one.line, one.what) for one in moved.findings]


def test_arguments() -> None:
    text = """
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard as shard
        from torch.distributed.tensor import DTensor

        def f(model, mesh, **options):
            dist.init_process_group("nccl", rank=0, nodes=1)
            torch.distributed.all_reduce(model, dist.ReduceOp.SUM, None, False, 5)
            shard(model, mesh=mesh, dp_mesh_dims=None)
            DTensor.from_local(
                model,
                mesh, layout=3)
            dist.all_reduce(model, *mesh, **options)
    """
    assert _told(text) == [
        (8, "dist.init_process_group(nodes=)"),
        (9, "torch.distributed.all_reduce(...)"),
        (10, "shard(dp_mesh_dims=)"),
        (13, "DTensor.from_local(layout=)"),
    ]
    told = {one.what: one for one in move_source(textwrap.dedent(text)).findings}
    assert told["shard(dp_mesh_dims=)"].why.startswith("Parameters that are DTensors already")
    assert told["torch.distributed.all_reduce(...)"].why == "disttrain's all_reduce takes 4 without a name, not 5"


def test_methods() -> None:
    text = """
        from torch.distributed import TCPStore
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        from torch.distributed.fsdp import fully_shard

        store = TCPStore("host", 1)
        store.get("key"), store.libuvBackend, store.collect_garbage()

        def f(mesh: DeviceMesh, model, other: int):
            mesh.get_group("dp"), mesh._flatten("x", backend_override=None)
            fully_shard(model).set_custom_all_gather(None)
            own = init_device_mesh("cpu", (1,))
            own.get_group(nothing=1), own.get_coordinate().nothing_of_the_kind()

        def g(mesh, store):
            mesh.no_such_thing, store.collect_garbage()
    """
    assert _told(text) == [
        (7, "store.collect_garbage"),
        (10, "mesh._flatten(backend_override=)"),
        (11, "fully_shard(model).set_custom_all_gather"),
        (13, "own.get_group(nothing=)"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        # Names that are somebody else's.
        "from torch.distributed import barrier\nbarrier = print\nbarrier(nothing=1)\n",
        "from torch.distributed import barrier\n\ndef f(barrier):\n    barrier(nothing=1)\n",
        "from torch.distributed import barrier\n\ndef f():\n    from other import barrier\n    barrier(nothing=1)\n",
        "try:\n    from torch.distributed import barrier\nexcept ImportError:\n    barrier = print\nbarrier(no=1)\n",
        # Objects of which it is not known what they are.
        "import torch.distributed as dist\nstore = dist.TCPStore('a', 1)\nstore = wrapped(store)\nstore.nothing()\n",
        "import torch.distributed as dist\n\ndef f(store):\n    store.nothing()\nstore = dist.TCPStore('a', 1)\n",
        # Any argument will do, or any number.
        "from torch.distributed import rendezvous\nrendezvous('env://', 0, 1, something=3)\n",
        "from torch.distributed.tensor import zeros\nzeros(1, 2, 3, 4, 5, device_mesh=None)\n",
        "from torch.distributed import ReduceOp\nReduceOp.SUM, ReduceOp('sum', nothing=1)\n",
    ],
)
def test_what_cannot_be_told_is_passed_over(text: str) -> None:
    assert move_source(text).findings == ()


def test_signatures_are_those_that_are_called() -> None:
    for package, name, arguments in (
        ("disttrain", "all_reduce", {"tensor", "op", "group", "async_op"}),
        ("disttrain.fsdp2", "MixedPrecisionPolicy", None),  # a dataclass says it otherwise
        ("disttrain.tp", "RowwiseParallel", {"input_layouts", "output_layouts", "use_local_output"}),
        ("disttrain.checkpoint", "load", {"state_dict", "checkpoint_id", "storage_reader", "planner"}),
    ):
        found = definition(package, name)
        assert found is not None
        taken = takes(found)
        assert (taken is None) == (arguments is None)
        assert taken is None or (taken.names >= (arguments or set()) and not taken.any_name)


def test_nothing_is_told_of_our_own_programs() -> None:
    tests = sorted((ROOT / "tests" / "multirank").glob("*.py"))
    for path in [*(ROOT / "examples").glob("*.py"), *tests[::4]]:
        text = path.read_text(encoding="utf-8")
        told = [
            one for one in move_source(text).findings if one.why.endswith(("no such argument", "no such attribute"))
        ]
        assert told == [], path


def test_lines_are_those_of_the_new_text() -> None:
    moved = move_source(
        "import torch.distributed\nimport torch\ntorch.distributed.barrier()\n\ntorch.distributed.rpc.x\n"
    )
    assert moved.text.splitlines()[moved.told[0].line - 1] == "torch.distributed.rpc.x"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from torch.distributed.tensor.experimental import context_parallel, local_map\n",
            "from disttrain.context_parallel import context_parallel\nfrom disttrain.dtensor import local_map\n",
        ),
        (
            "from torch.distributed.tensor.experimental._attention import context_parallel_unshard as unshard\n",
            "from disttrain.context_parallel import context_parallel_unshard as unshard\n",
        ),
        (
            "import torch.distributed as dist\nwith dist.tensor.experimental.context_parallel(mesh):\n    f()\n",
            "import disttrain as dist\nwith dist.context_parallel.context_parallel(mesh):\n    f()\n",
        ),
    ],
)
def test_context_parallel_has_a_part_of_its_own(before: str, after: str) -> None:
    moved = move_source(before)
    assert moved.text == after
    assert moved.findings == ()
    assert move_source(after).text == after


def test_private_names_of_context_parallel_have_a_reason() -> None:
    text = "from torch.distributed.tensor.experimental._attention import _ContextParallel, _cp_options\n"
    assert [what.rpartition(".")[2] for _, what in _told(text)] == ["_ContextParallel", "_cp_options"]
    with pytest.raises(AttributeError, match="which torch has: set_rotate_method says how keys come"):
        _ = context_parallel._cp_options


def test_an_argument_of_context_parallel_that_is_not_here() -> None:
    text = """
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard
        context_parallel_unshard(mesh, [x], [1], load_balancer=None)
    """
    assert [what for _, what in _told(text)] == ["context_parallel_unshard(load_balancer=)"]
