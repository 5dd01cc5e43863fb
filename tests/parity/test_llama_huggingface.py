"""The example's Llama and transformers': the same logits of the same files, written by either."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from llama.config import PRESETS, LlamaConfig, RotaryScaling
from llama.huggingface import has_weights, load_weights, our_name, read_config, save_weights, their_name
from llama.model import Llama
from llama.tokenizer import ByteTokenizer

from disttrain.errors import CheckpointError, SettingError

SMALL = replace(PRESETS["tiny"], vocabulary_size=96, max_length=64, rotary_base=500_000.0, norm_eps=1e-6)
SCALED = replace(SMALL, is_tied=True, rotary_scaling=RotaryScaling(8.0, 1.0, 4.0, 16))
TOKENS = torch.arange(120).reshape(2, 60) * 7 % 96


@pytest.fixture(scope="module")
def hf() -> ModuleType:
    return importlib.import_module("transformers")  # here, since it takes seconds


def made(config: LlamaConfig) -> Llama:
    model = Llama(config)
    model.init(seed=3)
    vary_gains(model)
    return model


def vary_gains(model: torch.nn.Module) -> None:
    """Norms that differ, so that it is seen which one is whose."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:
            torch.nn.init.constant_(parameter, 0.7 + 0.05 * number)


def assert_same_logits(ours: Llama, theirs: torch.nn.Module) -> None:
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        found = ours(TOKENS)
    assert expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("config", [SMALL, SCALED], ids=["plain", "tied and scaled"])
def test_transformers_reads_what_we_write(tmp_path: Path, config: LlamaConfig, hf: ModuleType) -> None:
    model = made(config)
    save_weights(model, tmp_path / "saved", ByteTokenizer())
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert isinstance(theirs, hf.LlamaForCausalLM)
    assert_same_logits(model, theirs)
    assert read_config(tmp_path / "saved") == config


@pytest.mark.parametrize("is_tied", [False, True])
def test_we_read_what_transformers_writes(tmp_path: Path, is_tied: bool, hf: ModuleType) -> None:
    torch.manual_seed(0)
    theirs = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=96,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=is_tied,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        )
    )
    vary_gains(theirs)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    ours = Llama(read_config(tmp_path))
    load_weights(ours, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_logits(ours, theirs)


def test_older_files_have_the_base_beside_the_scaling(tmp_path: Path, hf: ModuleType) -> None:
    theirs = json.loads(hf.LlamaConfig(hidden_size=48, num_attention_heads=6).to_json_string())
    theirs.pop("rope_parameters")
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs |= {"rope_theta": 5e5, "rope_scaling": {**scaling, "original_max_position_embeddings": 16}, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    config = read_config(tmp_path)
    assert (config.rotary_base, config.rotary_scaling) == (5e5, SCALED.rotary_scaling)


def test_names_go_there_and_back() -> None:
    names = list(Llama(PRESETS["tiny"]).state_dict())
    assert len(names) == 21
    assert [our_name(their_name(name)) for name in names] == names
    assert their_name("blocks.1.attention.query.weight") == "model.layers.1.self_attn.q_proj.weight"
    assert our_name("model.layers.1.self_attn.q_norm.weight") == "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "qwen3"}, "has model_type 'qwen3', which this Llama has not"),
        ({"attention_bias": True}, "has attention_bias True"),
        ({"head_dim": 16}, "has head_dim 16"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "scales rotary positions by 'yarn'"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changes: dict[str, object], problem: str, hf: ModuleType) -> None:
    theirs = json.loads(hf.LlamaConfig(hidden_size=48, num_attention_heads=6).to_json_string())
    (tmp_path / "config.json").write_text(json.dumps({**theirs, **changes}))
    with pytest.raises(SettingError) as caught:
        read_config(tmp_path)
    assert problem in caught.value.problem


@pytest.mark.parametrize(("text", "problem"), [("{", "is no JSON"), ("{}", "has model_type None")])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SettingError, match=problem):
        read_config(tmp_path)


def test_sizes_that_are_not_said_are_asked_for(tmp_path: Path, hf: ModuleType) -> None:
    theirs = json.loads(hf.LlamaConfig(hidden_size=48, num_attention_heads=6).to_json_string())
    del theirs["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps({**theirs, "rms_norm_eps": "small"}))
    with pytest.raises(SettingError, match="does not say vocab_size, rms_norm_eps"):
        read_config(tmp_path)


def test_weights_that_are_pickles_are_refused(tmp_path: Path) -> None:
    assert not has_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(SettingError, match="are pickles, which are not read"):
        has_weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert has_weights(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_weights(made(SMALL), tmp_path / "saved", ByteTokenizer())
    with pytest.raises(CheckpointError, match=r"embedding\.weight"):
        load_weights(made(replace(SMALL, vocabulary_size=95)), tmp_path / "saved")
