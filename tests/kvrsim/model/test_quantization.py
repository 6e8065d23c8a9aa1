"""quantization_config: the format of each matrix, the bytes of all weights, and refused formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvrsim
from kvrsim.cli import main as cli
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.gemm import GEMM_TYPES
from kvrsim.model.gemm import Gemm, WeightFormat
from kvrsim.model.load import config_path, load_model
from kvrsim.model.spec import LayerSpec, ModelSpec
from tests.kvrsim.model.model_configs import GLM, K3, V4, load

COMMANDS = {
    "plan": ["plan", "--gpus", "2", "--ctx", "512", "--strategies", "single,kvr-e"],
    "simulate": ["simulate", "--strategy", "kvr-e", "--gpus", "2", "--ctx", "512"],
    "map": ["map", "--gpus", "1,2", "--ctx", "512", "--strategies", "tsp"],
    "capacity": [
        *(
            "capacity",
            "--cluster",
            "a100-nvlink",
            "--requests",
            "synthetic:poisson,rate=1,requests=40,context=512",
            "--slo-ttft",
            "2s",
        ),
        *("--group-sizes", "1", "--replications", "2"),
    ],
}


def quantized(folder: Path, model: str = "llama-3-8b", **keys: Any) -> Path:
    content = json.loads(Path(config_path(model, "model")).read_text()) | keys
    path = folder / "quantized.json"
    path.write_text(json.dumps(content))
    return path


def loaded(folder: Path, model: str = "llama-3-8b", **config: Any) -> ModelSpec:
    return kvrsim.load_model(quantized(folder, model, quantization_config=config))


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs} | keys}
    }


def matrices(layer: LayerSpec) -> tuple[Gemm, ...]:
    """Matrices of the attention and of the MLP."""
    assert layer.mixer is not None
    return (*layer.mixer.matrices, *layer.mlp)


INT8, FLOAT8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16}
TENSORS = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
# kind of product, bits, bits of scales, size of a group in outputs and inputs
METHODS: list[tuple[dict[str, Any], tuple[str, int, int, int | None, int | None]]] = [
    ({"quant_method": "fp8", "activation_scheme": "static"}, ("fp8", 8, 32, None, None)),
    ({"quant_method": "fp8", "weight_block_size": [128, 64]}, ("fp8_block", 8, 32, 128, 64)),
    ({"quant_method": "fbgemm_fp8"}, ("fp8", 8, 32, 1, None)),
    ({"quant_method": "awq", "bits": 4, "group_size": 64}, ("int4_wo", 4, 20, 1, 64)),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, ("int4_wo", 4, 20, 1, 128)),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, ("int8_wo", 8, 24, 1, None)),
    ({"quant_method": "intel/auto-round", "bits": 4}, ("int4_wo", 4, 20, 1, 128)),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("int4_wo", 4, 32, 1, 64)),
    (
        {"quant_method": "bitsandbytes", "_load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        ("int4_wo", 4, 8, 1, 64),
    ),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ("int8", 8, 32, 1, None)),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("fp8", 8, 32, None, None)),
    ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}}, ("nvfp4", 4, 8, 1, 16)),
    ({"quant_algo": "W4A16_AWQ", "group_size": 128}, ("int4_wo", 4, 16, 1, 128)),
    (
        {"quant_method": "modelopt", "exclude_modules": ["lm_head"], **group(FLOAT4, {"num_bits": 4, "type": "float"})},
        ("nvfp4", 4, 8, 1, 16),
    ),
    ({**TENSORS, **group(FLOAT8, FLOAT8)}, ("fp8", 8, 16, 1, None)),
    ({**TENSORS, **group(FLOAT8 | {"strategy": "tensor"}, FLOAT8)}, ("fp8", 8, 16, None, None)),
    (
        {**TENSORS, **group(FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}, FLOAT8)},
        ("fp8_block", 8, 32, 128, 128),
    ),
    ({**TENSORS, **group(INT8, INT8)}, ("int8", 8, 16, 1, None)),
    ({**TENSORS, **group(INT8)}, ("int8_wo", 8, 16, 1, None)),
    ({**TENSORS, **group(INT4)}, ("int4_wo", 4, 20, 1, 32)),
    ({**TENSORS, **group(INT4, FLOAT8)}, ("fp8", 4, 20, 1, 32)),
    ({**TENSORS, **group(FLOAT4)}, ("int4_wo", 4, 8, 1, 16)),
]


@pytest.mark.parametrize(("config", "stored"), METHODS, ids=lambda one: json.dumps(one)[:70])
def test_every_method_has_its_format(
    config: dict[str, Any], stored: tuple[str, int, int, int | None, int | None], tmp_path: Path
) -> None:
    """All matrices of the layers are quantised; embedding, norms and head have the dtype of the request."""
    model = loaded(tmp_path, **config)
    compute, bits, scale_bits, outputs, inputs = stored
    weights = WeightFormat(
        compute=compute, bits=bits, scale_bits=scale_bits, group_outputs=outputs, group_inputs=inputs
    )
    (layer,) = model.layer_kinds
    assert {gemm.weights for gemm in matrices(layer)} == {weights}
    assert compute in GEMM_TYPES
    assert model.lm_head.weights is None
    assert model.quantization is not None
    assert model.quantization.formats == (weights,)
    plain = kvrsim.load_model("llama-3-8b")
    assert model.num_parameters == plain.num_parameters
    linear = sum(gemm.num_parameters for gemm in matrices(layer)) * len(model.layers)
    scales = 8 * (model.weight_bytes(2) - 2 * (plain.num_parameters - linear)) / linear - bits
    assert 0 <= scales <= 1.5
    size = inputs or 4096
    assert outputs not in (1,) or scales == pytest.approx(scale_bits / size, rel=0.4 if inputs is None else 1e-9)


@pytest.mark.parametrize(
    ("model", "config", "published"),
    [
        ("gpt-oss-20b", None, 13_761_264_768),  # total_size in the index of openai/gpt-oss-20b's weights
        ("llama-3-8b", {"quant_method": "fp8"}, 9.08e9),  # weights of FP8 checkpoints of the 8B model
        ("llama-3-70b", {"quant_method": "awq", "bits": 4, "group_size": 128}, 39.77e9),  # weights of AWQ checkpoints
    ],
)
def test_checkpoints_have_these_sizes(
    model: str, config: dict[str, Any] | None, published: float, tmp_path: Path
) -> None:
    spec = kvrsim.load_model(model) if config is None else loaded(tmp_path, model, **config)
    assert spec.weight_bytes(2) == pytest.approx(published, rel=0 if config is None else 1e-3)


def test_experts_alone_are_in_mxfp4() -> None:
    model = kvrsim.load_model("gpt-oss-20b")
    for layer in model.layer_kinds:
        assert {gemm.compute for gemm in layer.mlp} == {"mxfp4_wo"}
        assert layer.mixer is not None
        assert {gemm.compute for gemm in layer.mixer.matrices} == {None}
        assert layer.router is not None
        assert layer.router.compute is None


AWQ = {"quant_method": "awq", "bits": 4}


@pytest.mark.parametrize(
    ("model", "config", "kept"),
    [
        (
            "llama-3-8b",
            {**AWQ, "modules_to_not_convert": ["model.layers.*.mlp"]},
            {"gate_proj", "up_proj", "down_proj"},
        ),
        ("llama-3-8b", {**AWQ, "modules_to_not_convert": ["gate", "proj", "layers.1.mlp.up"]}, set()),
        ("llama-3-8b", {**TENSORS, **group(INT8), "ignore": ["re:.*o_proj$"]}, {"o_proj"}),
        ("llama-3-8b", {**TENSORS, **group(INT8, targets=["re:.*mlp.*", "q_proj"])}, {"k_proj", "v_proj", "o_proj"}),
        (
            "falcon-7b",
            {**AWQ, "modules_to_not_convert": ["transformer.h.*.self_attention"]},
            {"query_key_value", "dense"},
        ),
        (
            "mixtral-8x7b",
            {**AWQ, "modules_to_not_convert": ["block_sparse_moe.experts"]},
            {"gate_proj", "up_proj", "down_proj"},
        ),
    ],
)
def test_modules_that_stay_as_they_are(model: str, config: dict[str, Any], kept: set[str], tmp_path: Path) -> None:
    (layer,) = loaded(tmp_path, model, **config).layer_kinds
    plain = {gemm.name.rpartition(".")[2] for gemm in matrices(layer) if gemm.weights is None}
    assert plain == kept


def test_layers_may_differ(tmp_path: Path) -> None:
    """A layer in half precision forms a separate kind of layer."""
    model = loaded(tmp_path, **AWQ, modules_to_not_convert=["model.layers.3", "layers.5.mlp.up_proj"])
    assert model.layer_kind_index == (0, 0, 0, 1, 0, 2, *[0] * 26)


def test_a_head_is_quantised_where_the_file_says(tmp_path: Path) -> None:
    """A head that shares the embedding's weights is never quantised."""
    head = loaded(tmp_path, **{**TENSORS, **group(INT8), "ignore": []}).lm_head
    assert head.compute == "int8_wo"
    assert loaded(tmp_path, quant_method="gptq", bits=4, lm_head=True).lm_head.compute == "int4_wo"
    tied = kvrsim.load_model(
        quantized(tmp_path, tie_word_embeddings=True, quantization_config={"quant_method": "gptq", "lm_head": True})
    )
    assert tied.lm_head.compute is None
    assert tied.weight_bytes(2) + 2 * 128256 * 4096 == loaded(tmp_path, quant_method="gptq").weight_bytes(2)


@pytest.mark.parametrize(
    ("keys", "bits"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 8),
        ({"kv_cache_quant_algo": "nvfp4"}, 4),
        ({"kv_cache_scheme": None}, None),
        ({}, None),
    ],
)
def test_a_quantised_cache(keys: dict[str, Any], bits: int | None, tmp_path: Path) -> None:
    model = loaded(tmp_path, quant_method="modelopt", quant_algo="FP8", **keys)
    assert model.quantization is not None
    assert model.quantization.kv_cache_bits == bits
    elements = 2 * 8 * 128
    assert model.kv_bytes_per_token(2) == 32 * elements * (bits or 16) // 8


@pytest.mark.parametrize("method", ["exl2", "integers", None, "\x1b[31mred"])
def test_an_unknown_method_is_refused(method: str | None, tmp_path: Path) -> None:
    path = quantized(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(InputError, match=r"quantization_config\.quant_method: got .*accepted: aqlm, .*fp8") as caught:
        kvrsim.load_model(path)
    assert str(caught.value).isprintable()


def weights_of(model: ModelSpec) -> dict[str, int | None]:
    """Bits per weight of each matrix, by the number of the layer and the name of the matrix."""
    return {
        f"{number}.{gemm.name}": None if gemm.weights is None else gemm.weights.bits
        for number, layer in enumerate(model.layers)
        for gemm in (*matrices(layer), *layer.mlp)
    }


def test_modules_with_a_format_of_their_own(tmp_path: Path) -> None:
    """Formats from GPTQModel's patterns `dynamic` and AutoRound's names `extra_config`; layers that fp8 ignores."""
    dynamic = {"+:.*layers\\.0\\..*down_proj": {"bits": 8}, "-:.*q_proj": {}}
    bits = weights_of(loaded(tmp_path, quant_method="gptq", bits=4, group_size=128, dynamic=dynamic))
    assert (bits["0.mlp.down_proj"], bits["1.mlp.down_proj"], bits["5.self_attn.q_proj"]) == (8, 4, None)
    extra = {"model.layers.3.mlp.up_proj": {"bits": 16}, "model.layers.4.mlp.up_proj": {"bits": 8}}
    bits = weights_of(loaded(tmp_path, quant_method="intel/auto-round", bits=4, group_size=128, extra_config=extra))
    assert [bits[f"{number}.mlp.up_proj"] for number in (2, 3, 4)] == [4, None, 8]
    whole = loaded(tmp_path, quant_method="fp8", ignored_layers=["model.layers.0.self_attn"])
    assert weights_of(whole)["0.self_attn.q_proj"] is None
    assert weights_of(whole)["1.self_attn.q_proj"] == 8


@pytest.mark.parametrize(
    ("config", "bits", "compute"),
    [
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
            4,
            "int4_wo",
        ),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, 8, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}},
            },
            4,
            "mxfp4_wo",
        ),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only", "quant_type_kwargs": {}}, 4, "int4_wo"),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": {}}},
            },
            8,
            "fp8",
        ),
        ({"quant_method": "aqlm", "nbits_per_codebook": 16, "num_codebooks": 1, "in_group_size": 8}, 2, "int4_wo"),
        ({"quant_method": "higgs", "bits": 4, "group_size": 256}, 4, "int4_wo"),
        ({"quant_method": "quanto", "weights": "int8"}, 8, "int8_wo"),
        ({"quant_method": "mxfp8"}, 8, "fp8_block"),
        ({"quant_method": "sinq", "nbits": 4, "group_size": 64}, 4, "int4_wo"),
        ({"quant_method": "fp_quant", "forward_dtype": "nvfp4"}, 4, "nvfp4"),
        ({"quant_method": "marlin", "bits": 4, "group_size": 128}, 4, "int4_wo"),
    ],
)
def test_other_methods(config: dict[str, Any], bits: int, compute: str, tmp_path: Path) -> None:
    (layer,) = loaded(tmp_path, **config).layer_kinds
    assert {(gemm.weights.bits, gemm.compute) for gemm in layer.mlp if gemm.weights} == {(bits, compute)}


def test_quark_by_names_of_layers(tmp_path: Path) -> None:
    whole, attention = {"weight": {"dtype": "fp4", "group_size": 32}}, {"weight": {"dtype": "fp8_e4m3"}}
    config = {"global_quant_config": whole, "layer_quant_config": {"*self_attn*": attention}}
    bits = weights_of(loaded(tmp_path, quant_method="quark", exclude=["lm_head"], **config))
    assert (bits["0.mlp.up_proj"], bits["0.self_attn.q_proj"]) == (4, 8)
    with pytest.raises(InputError, match="layer_type_quant_config"):
        loaded(tmp_path, quant_method="quark", **config, layer_type_quant_config={"Linear": whole})
    with pytest.raises(InputError, match=r"weight\.dtype"):
        loaded(tmp_path, quant_method="quark", global_quant_config={"weight": {"dtype": "int3"}})


def test_a_pattern_that_would_take_for_ever_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="modules_to_not_convert"):
        loaded(tmp_path, **AWQ, modules_to_not_convert=["re:" + ".*a" * 12 + "$"])
    assert loaded(tmp_path, **AWQ, modules_to_not_convert=["*a" * 12]).quantization is not None


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ("fp8", "quantization_config"),
        ({"quant_method": "awq", "bits": 1}, "bits"),
        ({"quant_method": "gptq", "group_size": 1.5}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "ignore": ["re:([a-z.]+)+$"]}, "ignore"),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 99}}, "kv_cache_scheme.num_bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 7}}, "config_groups.a"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "New"}}}, "quant_type.default._type"),
        ({"quant_method": "aqlm", "num_codebooks": 2}, "num_codebooks"),
        ({**TENSORS, **group(INT8, targets=["re:["])}, "config_groups.group_0.targets"),
    ],
)
def test_nonsense_is_refused_by_key(config: Any, key: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        kvrsim.load_model(quantized(tmp_path, quantization_config=config))
    assert str(caught.value).startswith("model ")
    assert caught.value.parameter.endswith(f"quantized.json: {'' if config == 'fp8' else 'quantization_config.'}{key}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_so(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = quantized(tmp_path, quantization_config={"quant_method": "fp8"})
    assert cli.main([*COMMANDS[command], "--model", str(path), "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert any(note.startswith("quantized has quantised weights (fp8, 8 bits)") for note in warnings)


def test_the_answer_and_the_model_name_the_quantisation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = quantized(tmp_path, quantization_config=AWQ)
    assert cli.main([*COMMANDS["plan"], "--model", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["question"]["quantization"] == "awq, 4 bits"
    assert cli.main([*COMMANDS["plan"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["question"]["quantization"] is None
    assert cli.main(["models", "show", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["quantization"]["method"] == "awq"
    assert shown["weight_bytes"] == kvrsim.load_model(path).weight_bytes(2)
    assert shown["layer_kinds"][0]["mixer"]["output"][0]["weights"]["compute"] == "int4_wo"


# Names and precisions of NVIDIA's checkpoints


def test_a_file_of_quantisation_beside_the_configuration(tmp_path: Path) -> None:
    """hf_quant_config.json is used if config.json has no quantization_config."""
    content = json.loads(Path(config_path("llama-3-8b", "model")).read_text())
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    model = kvrsim.load_model(tmp_path)
    assert model.quantization is not None
    assert model.quantization.describe() == "modelopt, 4 bits, 8 bits a KV-cache element"
    assert {gemm.compute for gemm in matrices(model.layers[0])} == {"nvfp4"}
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": AWQ}))
    assert kvrsim.load_model(tmp_path).quantization == loaded(tmp_path, **AWQ).quantization


def test_mixed_precision_by_names(tmp_path: Path) -> None:
    """A name applies to all modules inside it, one expert represents all; other modules are not quantised."""
    layers = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1": {"quant_algo": "W4A16_NVFP4"}
        for layer in range(32)
        for expert in range(8)
    }
    layers |= {f"model.layers.{layer}.self_attn": {"quant_algo": "MXFP8"} for layer in range(32)}
    layers |= {"lm_head": {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    model = loaded(tmp_path, "mixtral-8x7b", **config)
    (layer,) = model.layer_kinds
    assert layer.mixer is not None
    assert {gemm.compute for gemm in layer.mixer.matrices} == {"fp8_block"}
    assert {(gemm.compute, gemm.weights and gemm.weights.bits) for gemm in layer.mlp} == {("int4_wo", 4)}
    assert model.lm_head.compute == "nvfp4"
    del layers["lm_head"], layers["model.layers.3.self_attn"]
    model = loaded(tmp_path, "mixtral-8x7b", **config)
    assert model.lm_head.compute is None
    assert {gemm.compute for gemm in model.layers[3].mixer.matrices} == {None}  # type: ignore[union-attr]


def test_experts_in_fp4_of_a_model_in_fp8(tmp_path: Path) -> None:
    """The model is in FP8 and its experts are in FP4, as in DeepSeek-V4."""
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = quantized(tmp_path, "mixtral-8x7b", quantization_config=config, expert_dtype="fp4")
    (layer,) = kvrsim.load_model(path).layer_kinds
    assert layer.mixer is not None
    assert {gemm.weights.bits for gemm in layer.mixer.matrices if gemm.weights} == {8}
    assert {gemm.weights.bits for gemm in layer.mlp if gemm.weights} == {4}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({**GLM, "index_topk_freq": 1}, {"self_attn.indexer.weights_proj", "mlp.gate"}),
        (
            V4,
            {
                "mlp.gate",
                *("self_attn.compressor.kv_proj", "self_attn.compressor.gate_proj"),
                "self_attn.compressor.indexer.scorer.weights_proj",
            },
        ),
        (K3, {"mlp.gate", "mlp.routed_expert_down_proj", "mlp.routed_expert_up_proj"}),
    ],
    ids=["glm_moe_dsa", "deepseek_v4", "kimi_k3"],
)
def test_what_engines_keep_in_half_precision(tmp_path: Path, config: dict[str, Any], kept: set[str]) -> None:
    """Engines keep these matrices in half precision, although the file does not list them."""
    model = load(tmp_path, {**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    stored = {gemm.name: gemm.weights for layer in model.layers for gemm in (*layer.matrices, *layer.mlp)}
    unquantised = {name for name, weights in stored.items() if weights is None}
    assert kept <= unquantised
    assert {name for name in unquantised if "compressor" not in name} <= kept


# -- Hugging Face ids that name a quantisation

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
MODELOPT = {"kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], "producer": {"name": "modelopt"}}
W4A16 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8_DYNAMIC = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "targets": ["Linear"],
}


@pytest.mark.parametrize(
    ("name", "shape", "published"),
    [
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b", BLOCKS | {"modules_to_not_convert": ["lm_head", "mlp.gate"]}),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3-30b-a3b", BLOCKS | {"modules_to_not_convert": ["lm_head"]}),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", "llama-3.1-70b", MODELOPT | {"quant_algo": "FP8"}),
        ("nvidia/Llama-3.1-70B-Instruct-NVFP4", "llama-3.1-70b", MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}),
        (
            "nvidia/MiniMax-M2.5-NVFP4",
            "minimax-m2.5",
            MODELOPT | {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.self_attn*"]},
        ),
        (
            "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic",
            "llama-3.1-70b",
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": FP8_DYNAMIC}, "ignore": ["lm_head"]},
        ),
        (
            "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
            "llama-3.1-8b",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": W4A16, "targets": ["Linear"]}},
                "ignore": ["lm_head"],
            },
        ),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "qwen2.5-72b", {"quant_method": "awq", "bits": 4, "group_size": 128}),
    ],
)
def test_a_quantised_id_is_its_published_checkpoint(
    tmp_path: Path, name: str, shape: str, published: dict[str, Any]
) -> None:
    config = dict(JsonObject.read(config_path(shape, "model"), "model").fields)
    of_file = load(tmp_path, {**config, "quantization_config": published})
    by_name = load_model(name)
    assert by_name.layers == of_file.layers
    assert by_name.lm_head == of_file.lm_head
    assert by_name.weight_bytes(2) == of_file.weight_bytes(2)
    assert by_name.cached_element_bytes(2) == of_file.cached_element_bytes(2)
    assert any("suffix" in sentence for sentence in by_name.approximations)


@pytest.mark.parametrize("name", ["mistralai/Mistral-Large-FP8", "nobody/llama-9-70b-awq"])
def test_a_quantised_id_of_an_unknown_shape_is_pointed_to_its_file_and_its_dtype(name: str) -> None:
    with pytest.raises(InputError, match="model: got") as caught:
        load_model(name)
    assert "config.json" in str(caught.value)
    assert "--dtype fp8" in str(caught.value)
