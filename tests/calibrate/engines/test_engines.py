"""Fits of engines to settings that known constants made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest

from calibrate.engines.fit import ENGINES, FORM, SPLITS, TERMS, fit, is_new_build, left_out, log_errors
from calibrate.engines.prefills import steps_of
from calibrate.engines.records import shipped_seconds
from calibrate.engines.settings import Settings, read_settings
from kvrsim.engine import load_engine
from kvrsim.errors import InputError

TRUTH = {"vllm": (5e-3, 1e-6, 2e-5, 1.0), "sglang": (5e-3, 1e-6, 5e-5, 1.02), "trtllm": (5e-3, 1e-6, 3e-5, 0.98)}


def made_up(model_factor: float = 1.0) -> Settings:
    """Settings of two models, two GPUs, three engines and two lengths."""
    rng, rows, launches, kernels = np.random.default_rng(1), [], [], []
    for engine, (request_s, token_s, launch_s, scale) in TRUTH.items():
        for model, count in (("dense", 1200.0), ("mixture", 2400.0)):
            for gpu in ("h100", "b200"):
                for tokens in (922, 7373):
                    kernel_s = tokens * rng.uniform(1e-5, 8e-5)
                    factor = model_factor if (engine, model) == ("sglang", "mixture") else 1.0
                    launches_s = launch_s * factor * count
                    seconds = request_s + token_s * tokens + launches_s + scale * kernel_s
                    seconds -= FORM.hidden_share * min(launches_s, scale * kernel_s)
                    row = {"model": model, "model_type": model, "gpu": gpu, "engine": engine, "engine_version": "0.1"}
                    row["kind"] = model
                    rows.append(row | {"precision": "fp8", "tp": 1, "moe_ep": 1, "mode": "agg"})
                    rows[-1] |= {"context_tokens": tokens, "nominal_isl": tokens, "prefill_s": seconds}
                    launches.append(count)
                    kernels.append(kernel_s)
    return Settings(
        rows=pandas.DataFrame(rows),
        kernels_s=np.array(kernels),
        launches=np.array(launches),
        collectives=np.zeros(len(rows)),
    )


def test_constants_lead_back_to_the_settings() -> None:
    settings = made_up()
    every = np.ones(len(settings), dtype=bool)
    assert np.abs(log_errors(settings, fit(settings, every).seconds(settings, every))).max() < 0.05


def test_what_disaggregated_fleets_add_is_no_engines() -> None:
    settings = made_up()
    mode = np.where(np.arange(len(settings)) % 2, "disagg", "agg")
    slower = settings.rows.prefill_s + 0.08 * (mode == "disagg")
    apart = replace(settings, rows=settings.rows.assign(mode=mode, prefill_s=slower))
    every = np.ones(len(settings), dtype=bool)
    constants = fit(apart, every)
    assert 0.05 < constants.transfer_s < 0.09, "shrunken towards its prior"
    errors = np.abs(log_errors(settings, constants.seconds(settings, every)))
    ignored = np.abs(
        log_errors(settings, fit(replace(apart, rows=apart.rows.assign(mode="agg")), every).seconds(settings, every))
    )
    assert np.median(errors) < 0.5 * np.median(ignored)


@pytest.mark.parametrize(
    ("row", "strategy", "pieces"),
    [
        ({"engine_version": "0.7.3", "context": "5000"}, "pp1", [2048, 2048, 904]),
        ({"engine_version": "0.19.0", "context": "8192"}, "single", None),
        ({"engine_version": "0.19.0", "context": "2358", "note": "max_num_batched_tokens 2048"}, "pp1", [2048, 310]),
        ({"engine_version": "0.19.0", "context": "9000", "strategy": "tp2", "n_gpus": "2"}, "tp2+pp1", [8192, 808]),
    ],
)
def test_long_prompts_take_steps(row: dict[str, str], strategy: str, pieces: list[int] | None) -> None:
    result = steps_of({"note": "", "gpu": "H100", "strategy": "single", "n_gpus": "1"} | row, "vllm")
    assert result == (strategy, pieces)


def test_a_model_type_has_launches_of_its_own() -> None:
    settings = made_up(model_factor=3.0)
    every = np.ones(len(settings), dtype=bool)
    constants = fit(settings, every)
    seconds = {
        name: np.exp(constants.by_engine[name][2] + constants.type_factor(name, "mixture", "mixture"))
        for name in ("sglang", "vllm")
    }
    assert seconds["sglang"] > 2 * TRUTH["sglang"][2], "shrunk, but most of the factor of 3 is there"
    assert seconds["vllm"] == pytest.approx(TRUTH["vllm"][2], rel=0.5)


def test_a_model_type_that_an_engine_did_not_run_is_as_on_the_others() -> None:
    settings = made_up()
    slow = settings.of("model") == "mixture"
    rows = settings.rows.assign(prefill_s=settings.rows.prefill_s + slow * 2400 * 4e-5)
    slower = replace(settings, rows=rows)
    known = ~(slow & (settings.of("engine") == "trtllm"))
    constants = fit(slower, known)
    common = constants.mixtures + constants.shared_types["mixture"]
    assert constants.type_factor("trtllm", "mixture", "mixture") == pytest.approx(common)
    assert common > 0.2
    assert constants.type_factor("trtllm", "unknown", "dense") == 0.0
    assert constants.type_factor("trtllm", "unknown", "mixture") == constants.mixtures


def test_a_slow_host_is_a_factor_of_its_gpu() -> None:
    settings = made_up()
    on_b200 = settings.of("gpu") == "b200"
    launches_s = np.array([TRUTH[name][2] for name in settings.of("engine")]) * settings.launches
    slower = replace(settings, rows=settings.rows.assign(prefill_s=settings.rows.prefill_s + on_b200 * launches_s))
    systems = fit(slower, np.ones(len(settings), dtype=bool)).systems
    assert systems["b200"] - systems["h100"] > 0.3


def test_the_newest_builds_tell_only_factors_on_launches() -> None:
    """Launches that take half as long count in factors of their model types and GPUs, not in the engines' terms."""
    settings = made_up()
    is_sglang = settings.of("engine") == "sglang"
    newest = settings.where(is_sglang)
    quick = 0.5 * TRUTH["sglang"][2] * newest.launches
    kernels_s = TRUTH["sglang"][3] * newest.kernels_s
    prefill_s = 5e-3 + 1e-6 * newest.of("context_tokens") + np.maximum(quick, kernels_s)
    newest = replace(newest, rows=newest.rows.assign(engine_version="0.5.13", prefill_s=prefill_s))
    both = settings.joined(newest)
    every = np.ones(len(both), dtype=bool)
    constants = fit(both, every)
    assert is_new_build(both).sum() == is_sglang.sum()
    alone = fit(settings, np.ones(len(settings), dtype=bool))
    gpus = dict.fromkeys(newest.of("gpu").tolist())
    assert sum(constants.systems[gpu] - alone.systems[gpu] for gpu in gpus) < 0
    assert all(np.array_equal(constants.by_engine[name], alone.by_engine[name]) for name in ENGINES)
    assert ("sglang", "0.5.13") not in constants.versions


@pytest.mark.parametrize("split", [*SPLITS, "engine"])
def test_what_is_left_out_does_not_change_its_own_prediction(split: str) -> None:
    settings = made_up()
    first = left_out(settings, split)
    group = settings.group(split)
    own = group == group[0]
    changed = settings.rows.assign(prefill_s=np.where(own, 5.0, settings.rows.prefill_s))
    again = left_out(
        Settings(
            rows=changed, kernels_s=settings.kernels_s, launches=settings.launches, collectives=settings.collectives
        ),
        split,
    )
    assert np.allclose(first[own], again[own], rtol=1e-4)
    assert not own.all() or split == "version"


def test_launches_and_kernels_are_those_of_the_simulator(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "vocab_size": 32000}
    config |= {"intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 4, "torch_dtype": "bfloat16"}
    (tmp_path / "tiny_config.json").write_text(json.dumps(config))
    row = {"model": "tiny", "config": "tiny", "cluster": "h100-nvlink", "engine": "vllm", "engine_version": "0.19.0"}
    row |= {"mode": "agg", "context_tokens": 1024, "moe_ep": 1, "precision": "bf16"}
    pandas.DataFrame([row | {"tp": tp, "prefill_s": 0.01} for tp in (1, 2)]).to_csv(tmp_path / "settings.csv")
    settings = read_settings(tmp_path / "settings.csv", tmp_path)
    assert settings.collectives.round(6).tolist() == [0.0, 9.0]  # two per layer, and one for the embedding
    assert settings.launches == pytest.approx([44, 44], rel=1e-3)  # eleven per layer
    seconds = shipped_seconds(settings)
    host = load_engine("vllm").host_of("llama")
    terms = host.request_s + 1024 * host.token_s + (1 - host.hidden_share) * host.launch_s * settings.launches[0]
    assert seconds[0] > terms > 0
    with pytest.raises(InputError, match="--configs"):
        read_settings(tmp_path / "settings.csv", tmp_path / "nothing")


@pytest.mark.parametrize("name", ENGINES)
def test_records_say_what_was_measured(name: str) -> None:
    engine = load_engine(name)
    assert engine.fit is not None
    assert engine.has_share_interval
    assert all((engine.models, engine.gpus, engine.versions, engine.systems))
    assert set(engine.models) <= set(engine.model_types) == set(load_engine("serving").model_types)
    assert set(TERMS) <= set(engine.spread)
