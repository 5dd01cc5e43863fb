"""The flagship example's command line, its file, the mesh, the model's sizes: what is taken, what refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_llama
from llama import flags
from llama.config import PRESETS, LlamaConfig, config_named, spelled
from llama.meshes import MeshPlan, parse_mesh
from llama.model import Llama

from disttrain.errors import SettingError

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


@pytest.mark.parametrize(
    ("text", "num_ranks", "plan"),
    [
        (None, 6, MeshPlan(dp=6)),
        ("dp=2,tp=2,pp=2", 8, MeshPlan(pp=2, dp=2, tp=2)),
        ("tp=2", 8, MeshPlan(dp=4, tp=2)),
        ("tp=4, pp=2, replicate=2", 16, MeshPlan(pp=2, replicate=2, tp=4)),
        ("dp=1", 1, MeshPlan()),
    ],
)
def test_a_mesh_takes_all_ranks(text: str | None, num_ranks: int, plan: MeshPlan) -> None:
    assert parse_mesh(text, num_ranks) == plan
    assert parse_mesh(str(plan), num_ranks) == plan


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dp=2,sp=4", "'dp=2,sp=4' is no mesh, because of 'sp=4'"),
        ("dp=2,dp=4", "because of 'dp=4'"),
        ("tp", "because of 'tp'"),
        ("tp=0", "because of 'tp=0'"),
        ("dp=2,tp=2", "'dp=2,tp=2' has 4 places, the job 8 ranks"),
        ("tp=3", "'tp=3' has 6 places, the job 8 ranks"),
    ],
)
def test_other_meshes_are_refused(text: str, problem: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_mesh(text, 8)
    assert problem in caught.value.problem


@pytest.mark.parametrize("name", PRESETS)
def test_sizes_can_be_spelled(name: str) -> None:
    assert config_named(spelled(PRESETS[name])) == PRESETS[name]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("huge", "'huge' is neither one of tiny, small, base, 1b, 3b, 7b, 8b, 13b, 70b, 405b, nor a folder with a con"),
        ("dim=64,depth=2", "nor sizes: depth is no size"),
        ("dim=x,num_layers=1,num_heads=1,num_kv_heads=1,hidden_size=4", "invalid literal for int() with base 10: 'x'"),
        ("dim=24,num_layers=1,num_heads=8,num_kv_heads=8,hidden_size=4", "dim 24 has 8 heads, of which 8 are"),
        ("dim=8,num_layers=1,num_heads=1,num_kv_heads=1,hidden_size=4,is_tied=no", "'no' is neither true nor false"),
        ("dim=24,num_layers=0,num_heads=2,num_kv_heads=2,hidden_size=4", "a size is below 1"),
    ],
)
def test_other_sizes_are_refused(text: str, problem: str) -> None:
    with pytest.raises(SettingError) as caught:
        config_named(text)
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--batch", "3"], "2 ranks along dp, ep and replicate, 1 microbatches each, cannot share --batch 3 evenly"),
        (["--steps", "0"], "argument --steps: '0' is not a whole number above 0"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a number above 0"),
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number"),
        (["--model", "huge"], "'huge' is neither one of"),
        (["--mesh", "dp=4"], "'dp=4' has 4 places, the job 2 ranks"),
        (["--mesh", "tp=2", "--seq", "127"], "tp=2 cannot share --seq 127 evenly"),
        (["--mesh", "cp=2", "--seq", "1"], "cp=2 is more ranks than a sequence has positions, 1"),
        (["--mesh", "pp=2", "--schedule", "2F2B"], "2F2B"),
        (["--schedule", "2F2B"], "2F2B"),
        (["--mesh", "pp=2", "--schedule", "ZBV", "--model", "tiny"], "ZBVZeroBubble on pp=2 has 4 stages, the model 2"),
        (
            ["--mesh", "pp=2", "--schedule", "ZBV", "--model", f"{spelled(replace(PRESETS['small'], is_tied=True))}"],
            "ZBVZeroBubble has the first and the last stage on one rank",
        ),
        (["--config", "none.toml"], "No such file or directory"),
        (["--mesh", "pp=2", "--schedule", "ForwardOnly"], "ForwardOnly trains nothing"),
        (["--export", "."], ". is there already"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--resume"], "there is no checkpoint in runs"),
        (["--resume", "--out", "there"], "there is no checkpoint in there"),
    ],
)
def test_nonsense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError) as caught:
        flags.parse(arguments, 2)
    assert problem in caught.value.problem
    assert "\n" not in str(caught.value)


def finished_run(*arguments: str) -> Path:
    parsed = flags.parse(arguments, 2)
    flags.save(parsed)
    (parsed.out / flags.CHECKPOINTS / "step-00000007").mkdir(parents=True)
    return Path(parsed.out)


def test_each_run_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert finished_run() == Path("runs/llama-1")
    assert finished_run() == Path("runs/llama-2")
    assert finished_run("--out", "mine") == Path("mine")
    assert flags.parse(["--resume"], 2).out == Path("runs/llama-2")
    with pytest.raises(SettingError, match="mine has a run in it"):
        flags.parse(["--out", "mine"], 2)


def test_a_save_that_died_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saves = Path("mine", flags.CHECKPOINTS)
    (saves / f"step-00000007.tmp-{'0' * 32}").mkdir(parents=True)
    with pytest.raises(SettingError, match="there is no checkpoint in mine"):
        flags.parse(["--resume", "--out", "mine"], 2)
    monkeypatch.setenv("DISTTRAIN_ROUND", "1")
    assert not flags.parse(["--out", "mine"], 2).resume  # a job that is started again begins again
    flags.save(flags.parse(["--out", "mine"], 2))
    (saves / "step-00000007").mkdir()
    assert flags.parse(["--out", "mine"], 2).resume


def test_a_file_may_name_the_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('out = "mine"\nsteps = 5\n')
    assert finished_run("--config", "run.toml") == Path("mine")
    with pytest.raises(SettingError, match="mine has a run in it"):
        flags.parse(["--config", "run.toml"], 2)
    assert flags.parse(["--config", "run.toml", "--resume"], 2).out == Path("mine")
    monkeypatch.setenv("DISTTRAIN_ROUND", "1")
    assert flags.parse(["--config", "run.toml"], 2).resume


def test_a_resumed_run_has_its_flags_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finished_run("--model", "tiny", "--seq", "32", "--lr", "0.01", "--steps", "7")
    resumed = flags.parse(["--resume", "--steps", "9"], 2)
    assert (resumed.model, resumed.seq, resumed.lr, resumed.steps) == ("tiny", 32, 0.01, 9)
    with pytest.raises(SettingError, match="the run in runs/llama-1 has --seq 32, not 64"):
        flags.parse(["--resume", "--seq", "64"], 2)


def test_a_file_has_the_flags_and_the_command_line_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("""
        mesh = "pp=2"
        kernels = true
        compile = true
        [data]
        seq = 64
        [training]
        lr = 1e-3
        save_every = 0
        [model]
        dim = 64
        num_layers = 4
        num_heads = 4
        num_kv_heads = 2
        hidden_size = 160
    """)
    found = flags.parse(["--config", str(path), "--seq", "32", "--no-compile"], 2)
    assert (found.mesh, found.kernels, found.compile) == (MeshPlan(pp=2), True, False)
    assert (found.seq, found.lr, found.save_every, found.microbatches) == (32, 1e-3, 0, 4)
    assert found.sizes == LlamaConfig(dim=64, num_layers=4, num_heads=4, num_kv_heads=2, hidden_size=160)
    path.write_text("speed = 3")
    with pytest.raises(SettingError, match="unrecognized arguments: --speed=3"):
        flags.parse(["--config", str(path)], 2)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="Name a TOML file"):
        flags.parse(["--config", str(path)], 2)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_files_that_are_there_can_be_run(path: Path) -> None:
    num_ranks = int(path.read_text().partition("--nproc-per-node ")[2].split()[0])
    assert flags.parse(["--config", str(path), "--data", "text", "--tokenizer", "bytes"], num_ranks).config == path


def test_a_position_sees_only_what_is_before_it() -> None:
    model = Llama(PRESETS["tiny"])
    model.init(seed=0)
    tokens = torch.arange(24).view(2, 12)
    changed = tokens.clone()
    changed[:, 8:] += 100
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 256)
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6)
    assert not torch.isclose(before[:, 8:], after[:, 8:]).all(-1).any()


def test_what_a_parameter_is_drawn_from_does_not_depend_on_others() -> None:
    model, deeper = Llama(PRESETS["tiny"]), Llama(replace(PRESETS["tiny"], num_layers=3))
    for one in (model, deeper):
        one.init(seed=5)
    assert torch.equal(model.blocks[1].attention.query.weight, deeper.blocks[1].attention.query.weight)
    assert not torch.equal(model.blocks[0].attention.query.weight, model.blocks[1].attention.query.weight)


def test_who_stops_a_run_is_told_how_it_goes_on(tmp_path: Path) -> None:
    """Not from a checkpoint that was never saved."""
    assert train_llama.how_to_go_on(tmp_path) == f"nothing was saved in {tmp_path} yet; --save-every says how often"
    (tmp_path / "checkpoints" / "step-00000100").mkdir(parents=True)
    assert train_llama.how_to_go_on(tmp_path).startswith(f"--resume --out {tmp_path} goes on")
