"""`python -m disttrain.plan`: what it prints and writes, and its one error for what is wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from llama import flags as example_flags
from llama.config import config_named

from disttrain.errors import SettingError
from disttrain.plan import HARDWARE, PRESETS, LlamaSizes, read_sizes
from disttrain.plan.cli import main
from disttrain.plan.time.hardware import read_hardware, to_json
from disttrain.plan.time.measure import Sizes, rates_of

ARGUMENTS = ["--model", "8b", "--gpus", "16", "--gpu-memory", "80", "--batch-tokens", "524288", "--top", "3"]
HUGGING_FACE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
SMALL = LlamaSizes(64, 2, 4, 2, 96, 1000, is_tied=True)


def test_it_lists_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plans.json"
    assert main([*ARGUMENTS, "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8.03G parameters on 16 x NVIDIA H100 SXM on 2 nodes: 64 sequences of 8192 tokens")
    found = json.loads(path.read_text())
    first = found["plans"][0]
    assert lines[3].split()[0] == "1"
    assert sum(first["memory_bytes"].values()) == first["memory_total_bytes"] <= 0.9 * 80 * 2**30
    assert [plan["step_s"] for plan in found["plans"]] == sorted(plan["step_s"] for plan in found["plans"])
    assert f"  {first['command']}" in lines
    words = shlex.split(first["command"])
    mesh = words[words.index("--mesh") + 1]
    assert mesh in lines[3]
    assert words[:5] == ["disttrain-launch", "--nnodes", "2", "--nproc-per-node", "8"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--mesh", "pp=4,dp=2,tp=2"],
        ["--mesh", "replicate=2,dp=8"],
        ["--mesh", "pp=8,dp=2", "--schedule", "Interleaved1F1B", "--batch-tokens", "131072"],
    ],
)
def test_the_example_takes_the_command(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    assert main([*ARGUMENTS, *arguments, "--json", str(path)]) == 0
    for plan in json.loads(path.read_text())["plans"]:
        words = shlex.split(plan["command"])
        given = words[words.index("examples/train_llama.py") + 1 :]
        found = example_flags.parse([*given, "--out", str(tmp_path / "run")], 16)
        assert vars(found.mesh) == plan["choice"]["mesh"]
        assert found.sizes == config_named("8b")
        assert found.microbatches == plan["choice"]["num_microbatches"]
        assert (found.plan and found.plan.name) == plan["choice"]["schedule"]
        assert found.stages_per_rank == plan["choice"]["stages_per_rank"]
        if found.stages_per_rank is not None:
            assert found.plan.num_stages == found.mesh.pp * found.stages_per_rank
        assert (found.recompute, found.compile) == (plan["choice"]["recomputes"], plan["choice"]["is_compiled"])


def test_a_plan_overrules_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "1b"\nrecompute = true\n')
    assert main(["--model", str(path), "--gpus", "8", "--batch-tokens", "524288"]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if "train_llama.py" in line)
    assert f"--config {path}" in command
    assert command.endswith("--kernels --no-recompute --compile --reduce-each")


def test_a_folder_gives_its_tokenizer_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE))
    arguments = ["--model", str(tmp_path), "--gpus", "2", "--batch-tokens", "524288"]
    assert main(arguments) == 0
    assert "--tokenizer" not in capsys.readouterr().out
    (tmp_path / "tokenizer.json").touch()
    assert main(arguments) == 0
    assert f"--model {tmp_path} --tokenizer {tmp_path}" in capsys.readouterr().out


def test_it_says_what_the_example_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = f"{SMALL.spelled},head_dim=32,vocab=1000"
    assert main(["--model", sizes, "--gpus", "2", "--batch-tokens", "524288"]) == 0
    assert "to run it (the example has no flag for head_dim):" in capsys.readouterr().out
    assert main([*ARGUMENTS, "--float8"]) == 0
    assert "to run it (the example has no flag for --float8):" in capsys.readouterr().out


def test_it_draws_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.svg"
    assert main([*ARGUMENTS, "--mesh", "pp=4,dp=4", "--schedule", "1f1b", "--svg", str(path)]) == 0
    assert path.read_text(encoding="utf-8").startswith("<svg ")
    assert main([*ARGUMENTS, "--mesh", "dp=16", "--svg", str(path)]) == 2
    assert "dp=16 has no pipeline to be drawn" in capsys.readouterr().err


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--gpu-memory", "7"]) == 1
    out = capsys.readouterr().out
    assert "Nothing fits." in out
    assert "the best of" not in out
    assert "It would fit with GPUs of" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "8"], "--model is missing"),
        (["--model", "8b"], "--gpus is missing"),
        (["--model", "9b", "--gpus", "8"], "'9b' is no preset, and cannot be read"),
        (["--model", "dim=64,num_layers=2", "--gpus", "8"], "does not say num_heads"),
        (["--model", "dim=64,n_layer=2", "--gpus", "8"], "has 'n_layer', which is no size"),
        (["--model", f"{SMALL.spelled},vocab=9,head_dim=0", "--gpus", "8"], "head_size is 0"),
        (["--model", "dim=64,layers=2,heads=4,ffn=96,vocab=9,tied=no", "--gpus", "8"], "is_tied is 'no'"),
        (["--model", f"{SMALL.spelled},vocab=9,rotary_base=x", "--gpus", "8"], "rotary_base is 'x'"),
        (["--model", f"{SMALL.spelled},vocab=9,rotary_base=inf", "--gpus", "8"], "rotary_base is inf"),
        (["--model", "8b", "--gpus", "12"], "12 GPUs do not fill nodes of 8"),
        (["--model", "8b", "--gpus", "8", "--seq", "3000"], "is no multiple of --seq 3000"),
        (["--model", "8b", "--gpus", "8", "--mesh", "dp=4"], "has 4 places, --gpus is 8"),
        (["--model", "8b", "--gpus", "8", "--mesh", "xp=8"], "is no mesh, because of 'xp=8'"),
        (["--model", "mixtral-8x7b", "--gpus", "8", "--imbalance", "0.5"], "Give the most over the mean"),
        (["--model", "mixtral-8x7b", "--gpus", "8", "--hidden-exchange", "2"], "Give a share from 0 to 1"),
        (["--model", "mixtral-8x", "--gpus", "8"], "mixtral-8x7b"),
        (["--model", "8b", "--gpus", "8", "--hardware", "h10"], "Did you mean h100?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "wrong", [["--gpus", "0"], ["--gpu-memory", "none"], ["--schedule", "2F2B"], ["--schedule", "ForwardOnly"]]
)
def test_what_is_no_value_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*ARGUMENTS, *wrong])


def test_models_are_read_in_all_their_forms(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE))
    assert read_sizes(str(tmp_path)) == read_sizes(str(tmp_path / "config.json")) == SMALL
    ours = tmp_path / "run.toml"
    sizes = "dim = 64\nnum_layers = 2\nnum_heads = 4\nnum_kv_heads = 2\nhidden_size = 96\nis_tied = true\n"
    ours.write_text(f"[model]\n{sizes}")
    assert read_sizes(str(ours), 1000) == SMALL
    assert read_sizes(SMALL.spelled, 1000) == SMALL
    ours.write_text('[run]\nsteps = 3\n[model]\nname = "x"\n')
    with pytest.raises(SettingError, match="does not say dim/hidden_size, num_layers/num_hidden_layers"):
        read_sizes(str(ours))
    (tmp_path / "config.json").write_text(json.dumps({**HUGGING_FACE, "num_local_experts": 8}))
    with pytest.raises(SettingError, match="does not say how many of 8 experts a token has"):
        read_sizes(str(tmp_path))
    ours.write_text('model = "8b"\n')
    assert read_sizes(str(ours)) == PRESETS["8b"]
    ours.write_text("model = ")
    with pytest.raises(SettingError, match=r"run\.toml is no TOML"):
        read_sizes(str(ours))


def test_numbers_of_parameters() -> None:
    """As the models' cards say."""
    counts = {name: round(sizes.num_parameters / 1e9, 2) for name, sizes in PRESETS.items()}
    own = {name: counts.pop(name) for name in ("tiny", "small", "base")}
    assert counts == {"1b": 1.24, "3b": 3.21, "7b": 6.74, "8b": 8.03, "13b": 13.02, "70b": 70.55, "405b": 405.85}
    assert own == {"tiny": 0.0, "small": 0.0, "base": 0.08}


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("7B", "7b"),
        ("llama2-7b", "7b"),
        ("meta-llama/Llama-2-13b-chat-hf", "13b"),
        ("Llama3-8B", "8b"),
        ("meta-llama/Meta-Llama-3-70B", "70b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "8b"),
        ("llama-3.2-1b", "1b"),
    ],
)
def test_models_go_by_the_names_that_others_give_them(text: str, preset: str) -> None:
    """In the planner, and in the script that it prints the command of."""
    assert read_sizes(text) == PRESETS[preset]
    assert config_named(text) == config_named(preset)


@pytest.mark.parametrize("text", ["llama-3-7b", "9b", "meta-llama", "llama-", "7b-", "/7b/"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match=r"is no preset, and cannot be read.*one of tiny, small, base, 1b, 3b, 7b"):
        read_sizes(text)


def test_a_folder_comes_before_the_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "meta-llama" / "Llama-3.1-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(HUGGING_FACE))
    monkeypatch.chdir(tmp_path)
    assert read_sizes("meta-llama/Llama-3.1-8B") == SMALL


def test_where_there_is_no_repository_it_says_how_to_get_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands are followed by tests/multirank/test_newcomers.py."""
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "small", "--gpus", "2", "--seq", "128", "--batch-tokens", "2048"]) == 0
    out = capsys.readouterr().out
    commands = out.partition("to run it:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in commands] == ["python", "disttrain-launch"]
    assert commands[0] == "  python -m disttrain.examples examples"
    assert "--tokenizer" not in commands[1]
    assert main(ARGUMENTS) == 0
    assert "(tokenizer.json is the model's own, " in capsys.readouterr().out
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train_llama.py").touch()
    assert main(ARGUMENTS) == 0
    out = capsys.readouterr().out
    assert "to run it:\n  disttrain-launch" in out
    assert "(tokenizer.json" not in out


def test_hardware_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(to_json(HARDWARE["h200"]))
    assert read_hardware(str(path)) == HARDWARE["h200"]
    path.write_text('{"name": "mine"}')
    with pytest.raises(SettingError, match="does not hold hardware"):
        read_hardware(str(path))
    path.write_text(to_json(HARDWARE["h200"]).replace("139.8", "-1"))
    with pytest.raises(SettingError, match="memory_gib is -1"):
        read_hardware(str(path))


def test_rates_are_measured() -> None:
    sizes = Sizes(matrix=64, seq=32, heads=2, head_size=16, copied_bytes=1 << 16, num_runs=2, settling_s=0.0)
    assert min(rates_of(torch.device("cpu"), sizes).values()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--measure", str(tmp_path / "x.json")]) == 2
    assert "There is no GPU here" in capsys.readouterr().err
