"""Files of models: a mistake is refused with file and key, and a model has the name of its file."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model import template
from kvrsim.model.load import add_model, builtin_models, config_path, load_model, read_config
from tests.kvrsim.model.model_configs import GQA, LLAMA, SMALL, load

# Mistakes of users


def refusal(folder: Path, config: object) -> str:
    with pytest.raises(InputError) as caught:
        load(folder, config)
    message = str(caught.value)
    assert message.startswith("model ")
    assert "\n" not in message
    return message


_REQUIRED = ("model_type", *(key for key in SMALL if key != "intermediate_size"))


@pytest.mark.parametrize("key", _REQUIRED)
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, float("nan"), float("inf"), "32", True, [], {}, 10**30], ids=repr)
def test_bad_value_is_refused_by_file_and_key(tmp_path: Path, key: str, value: object) -> None:
    assert f"config.json: {key}: got" in refusal(tmp_path, {**LLAMA, key: value})


@pytest.mark.parametrize("key", _REQUIRED)
def test_missing_key_is_refused(tmp_path: Path, key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key}
    assert f"config.json: {key} is missing" in refusal(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "mixtral", "num_key_value_heads": 4, "num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)
def test_nonsense_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    assert f"config.json: {key}: got" in refusal(tmp_path, {**LLAMA, **changes})


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("doge", "dt_proj"), ("diffllama", "FLOPs of self_attn"), ("Llama", "a model_type of transformers")],
)
def test_what_cannot_be_described_is_refused_by_its_part(tmp_path: Path, model_type: str, reason: str) -> None:
    message = refusal(tmp_path, {**LLAMA, "model_type": model_type})
    assert f"model_type: got '{model_type}" in message
    assert reason in message


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "t5", "is_encoder_decoder": True}
    assert "got 't5, an encoder-decoder'" in refusal(tmp_path, config)


def test_truncated_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA)[:-5])
    with pytest.raises(InputError, match=r"^model: got '.*', accepted: a file of valid JSON"):
        load_model(path)


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"accepted: a folder that holds a config\.json$"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["llama-8b", "", " ", "no/such/config.json", "x" * 5000, "a\0b"])
def test_unknown_name_says_where_the_known_ones_are(name: str) -> None:
    with pytest.raises(InputError, match=r"^-m: got '.*accepted: .*kvrsim models list"):
        load_model(name, argument="-m")


def test_name_of_a_users_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    assert load(folder, LLAMA).name == "my-llama"
    (tmp_path / "tiny.json").write_text(json.dumps(LLAMA))
    assert load_model(tmp_path / "tiny.json").name == "tiny"


# A file of several models: the text model is read, and the answer names the parts that are left out.

TEXT = {"model_type": "qwen3_vl_text", **GQA}
FURTHER = "what is beside the text model, such as a vision tower, is left out"


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        ({"vision_config": {}, "audio_config": {}}, ("the vision tower is left out", "the audio tower is left out")),
        ({}, (FURTHER,)),
    ],
)
def test_what_is_left_out_is_told(tmp_path: Path, outer: dict[str, Any], told: tuple[str, ...]) -> None:
    model = load(tmp_path, {"model_type": "qwen3_vl", "text_config": TEXT, **outer})
    assert model.approximations == told
    assert model.model_type == "qwen3_vl_text"
    assert model.num_parameters == load(tmp_path, TEXT).num_parameters


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_outer_file_ties_and_quantises(tmp_path: Path, key: str) -> None:
    outer = {"model_type": "some", "tie_word_embeddings": True, "quantization_config": {"quant_method": "fp8"}}
    model = load(tmp_path, {**outer, key: {**LLAMA, "tie_word_embeddings": False}})
    assert model.tie_word_embeddings
    assert model.quantization is not None
    assert model.quantization.method == "fp8"
    inside = {**LLAMA, "quantization_config": {"quant_method": "awq"}}
    assert load(tmp_path, {"model_type": "some", key: inside}).quantization is not None


def test_a_text_model_without_a_type_is_that_of_the_outer_file(tmp_path: Path) -> None:
    text = {key: value for key, value in TEXT.items() if key != "model_type"}
    assert load(tmp_path, {"model_type": "qwen3_vl", "text_config": text}).model_type == "qwen3_vl_text"
    with pytest.raises(InputError, match=r"text_config\.model_type is missing"):
        load(tmp_path, {"model_type": "some", "text_config": text})


def test_keys_that_nested_files_leave_out_have_transformers_defaults(tmp_path: Path) -> None:
    """Files of Gemma 3 leave out keys whose values are transformers' defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    model = load(tmp_path, {"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (8, 4, 256)
    assert (model.vocab_size, model.tie_word_embeddings) == (262208, True)
    assert model.num_parameters == 3_880_263_168  # parameters of google/gemma-3-4b-pt without its vision tower


def test_a_mistake_is_told_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: text_config\.hidden_size: got '0'"):
        load(tmp_path, {"model_type": "some", "text_config": {**LLAMA, "hidden_size": 0}})
    with pytest.raises(InputError, match="is_encoder_decoder"):
        load(tmp_path, {"model_type": "some", "is_encoder_decoder": True, "text_config": LLAMA})


# Published configurations, most of them without code in transformers, with their published numbers of parameters

PUBLISHED = json.loads(Path(__file__).with_name("published_models.json").read_text("utf-8"))


def test_published_models_are_read_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrsim.model.load.find_spec", lambda name: None)
    assert [load_model(name).name for name in builtin_models()] == list(builtin_models())
    for name, row in PUBLISHED.items():
        model = load(tmp_path, row["config"])
        assert model.num_parameters == pytest.approx(row["billions"] * 1e9, rel=0.03), name
        if row["active"] is not None:  # reports round, and some do not count embeddings
            assert model.active_parameters == pytest.approx(row["active"] * 1e9, rel=0.12), name


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("baichuan2-7b", {"num_experts": 8}, "num_experts: got '8', accepted: nothing: the layers are read as"),
        ("ling-lite", {"use_bias": True}, "use_bias: got 'true', accepted: false"),
        ("longcat-flash", {"zero_expert_type": "copy", "num_layers": 2}, "model_type: got 'longcat_flash"),
        ("kimi-linear-48b", {"moe_layer_freq": 2}, "moe_layer_freq: got '2', accepted: 1"),
        ("decilm-7b", {"num_key_value_heads_per_layer": [4]}, "block_configs"),
    ],
)
def test_a_type_read_as_another_must_be_known_whole(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(tmp_path, {**PUBLISHED[name]["config"], **changes})


def test_alibi_of_baichuan_13b_and_blocks_of_minicpm(tmp_path: Path) -> None:
    models = {name: load(tmp_path, PUBLISHED[name]["config"]) for name in ("baichuan2-7b", "baichuan2-13b")}
    assert [model.alibi for model in models.values()] == [False, True]
    notes = load(tmp_path, PUBLISHED["minicpm4-8b"]["config"]).approximations
    assert notes == ("attention to chosen blocks of keys is counted as attention to all keys",)


CONFIGS = {name: json.loads(Path(config_path(name, "model")).read_text("utf-8")) for name in builtin_models()}

# Files that are of another model than their model_type

FOREIGN = {
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "kv_lora_rank": 512,
    "index_topk": 64,
    "mamba_d_state": 16,
    "linear_attn_config": {"head_dim": 16},
}
GROK = {  # sizes of xai-org/grok-2, whose model_type is that of another model
    **{"hidden_size": 8192, "intermediate_size": 32768, "moe_intermediate_size": 16384, "num_hidden_layers": 64},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    **{"head_dim": 128, "vocab_size": 131072, "architectures": ["Grok1ForCausalLM"], "model_type": "git"},
}


@pytest.mark.parametrize("config", [GROK, {**LLAMA, "architectures": ["MixtralForCausalLM"]}], ids=["grok-2", "llama"])
def test_a_file_of_another_class_than_its_type_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    message = refusal(tmp_path, config)
    assert "architectures: got" in message
    assert config["model_type"] in message


@pytest.mark.parametrize("key", FOREIGN)
def test_a_size_that_the_catalogue_does_not_know_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr("kvrsim.model.load.find_spec", lambda name: None)
    assert f"config.json: {key}: got" in refusal(tmp_path, {**LLAMA, key: FOREIGN[key]})


def test_a_value_that_the_catalogue_does_not_cover_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrsim.model.load.find_spec", lambda name: None)
    kinds = ["sliding_attention"] * 6 + ["full_attention"] * 2
    assert "config.json: layer_types: got" in refusal(tmp_path, {**LLAMA, "layer_types": kinds})


@pytest.mark.parametrize("model", [*builtin_models(), *PUBLISHED])
def test_published_files_name_a_class_of_their_type(model: str) -> None:
    """No published file is refused for its class: those of the catalogue, and with the class that the Hub names."""
    config = PUBLISHED[model]["config"] if model in PUBLISHED else CONFIGS[model]
    assert read_config(JsonObject(fields=config, where=model), model).num_parameters > 0


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("kimi_k2", "DeepseekV3ForCausalLM"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("grok-1", "Grok1ModelForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("chatglm", "ChatGLMModel"),
        ("RefinedWebModel", "RWForCausalLM"),
        ("bailing_moe", "BailingMoeV2ForCausalLM"),
        ("Yi", "YiForCausalLM"),
        ("llama", "MyLlamaForCausalLM"),
    ],
)
def test_a_class_of_the_type_or_an_unknown_one_is_accepted(model_type: str, architecture: str) -> None:
    known = template.targets()
    plain = template.plain_type(model_type)
    theirs = known.get(template.plain_type(architecture))
    assert theirs is None or theirs & known.get(plain, {plain})


# A configuration with a senseless value is either read or refused with an error.
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 10**30, 0.5, float("nan"), "", "x", "1,2", "9" * 6000),
    *([], [0], [1] * 8, [None], [[]], [{}], ["full_attention"], ["sliding_attention"] * 4, {}, {"a": 1}),
]


def places(content: Any) -> list[tuple[Any, Any]]:
    """Every object or array in a configuration with each of its keys or indices."""
    if not isinstance(content, dict | list):
        return []
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    return [(content, key) for key in keys] + [place for key in keys for place in places(content[key])]


@pytest.mark.slow  # slow, because many configurations need the class of transformers
@given(
    name=st.sampled_from(sorted(CONFIGS)), number=st.integers(0, 10_000), junk=st.sampled_from(JUNK), gone=st.booleans()
)
def test_a_value_that_makes_no_sense(name: str, number: int, junk: Any, gone: bool) -> None:
    config = copy.deepcopy(CONFIGS[name])
    result = places(config)
    inside, key = result[number % len(result)]
    if gone and isinstance(inside, dict):
        del inside[key]
    else:
        inside[key] = copy.deepcopy(junk)
    try:
        model = read_config(JsonObject(fields=config, where="model"), name)
    except InputError:
        return
    assert 0 < model.active_parameters <= model.num_parameters
    assert model.weight_bytes(2) > 0
    assert model.cache_bytes(100, 2) >= 0


# Models that the user has added


@pytest.mark.parametrize(
    "expression",
    ["().__class__.__base__.__subclasses__()", "__import__('os').mkdir('made')", "[1 for x in (1,)]", "9**9**9", "1 +"],
)
def test_a_model_of_the_catalogue_runs_no_code(
    tmp_path: Path, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without assertions (python -O)."""
    monkeypatch.setenv("KVRSIM_MODELS", str(tmp_path / "models"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    _, folder = add_model(str(tmp_path / "config.json"), "ours")
    path = folder / "model.json"
    content = json.loads(path.read_text())
    content["model"]["ModelSpec"]["hidden_size"] = f"={expression}"
    path.write_text(json.dumps(content))
    command = [sys.executable, "-O", "-m", "kvrsim", "models", "show", "ours"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 2, shown.stderr
    assert "model.json" in shown.stderr
    assert shown.stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["config.json", "models"]
