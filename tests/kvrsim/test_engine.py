"""Engine records: reading, errors, and the seconds that each term adds to a prefill."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvrsim
from kvrsim.engine import NO_ENGINE, NO_HOST, TERMS, Engine, HostRates, builtin_engines, is_before, load_engine
from kvrsim.errors import InputError
from kvrsim.kernels.profile import load_profile

ALONE: dict[str, Any] = {"gpus": 1, "ctx": 4096, "model": "llama-2-7b", "cluster": "a100-nvlink", "strategy": "single"}
NOTHING = Engine(name="nothing", title="t", description="d", not_covered="n", host=NO_HOST)


def with_host(**seconds: float) -> Engine:
    """An engine that adds only these terms."""
    return replace(NOTHING, host=replace(NO_HOST, **seconds))


def ttft_s(engine: Engine | str, **changes: Any) -> float:
    return kvrsim.simulate(**(ALONE | {"profile": "a100-flash"} | changes), engine=engine).ttft_s


@pytest.mark.parametrize("name", builtin_engines())
def test_built_in_engines_are_read_and_written_whole(name: str, tmp_path: Path) -> None:
    engine = load_engine(name)
    assert engine.name == name
    engine.write(tmp_path / "again.json")
    assert load_engine(tmp_path / "again.json") == engine
    assert set(engine.spread) <= set(TERMS)


def test_the_engines_that_are_promised_ship() -> None:
    promised = {"hf-2023", "vllm-2023", "tensorrt-llm-0.5", "lmdeploy-0.1", "loongserve-2024", "serving"}
    assert promised <= set(builtin_engines())


def test_an_unknown_engine_is_refused_with_the_names() -> None:
    with pytest.raises(InputError, match=r"^engine: got 'vllm-1999', accepted: a JSON file, none, or one of hf-2023, "):
        ttft_s("vllm-1999")
    with pytest.raises(InputError, match="engine: got 'vllm-2023@1'"):
        load_engine("vllm-2023@1")
    with pytest.raises(InputError, match=r"^engine: got 'serving', accepted: none beside the roofline"):
        ttft_s("serving", profile="roofline")


def test_terms_of_a_request_are_added() -> None:
    alone = ttft_s(NOTHING)
    assert ttft_s(with_host(request_s=0.25)) == pytest.approx(alone + 0.25)
    assert ttft_s(with_host(token_s=1e-4)) == pytest.approx(alone + 4096 * 1e-4)
    assert ttft_s(with_host(token_s=1e-4), batch=2) == pytest.approx(ttft_s(NOTHING, batch=2) + 2 * 4096 * 1e-4)
    assert ttft_s(with_host(step_s=0.125)) == pytest.approx(alone + 0.125)


def test_kernel_scale_is_of_kernels_alone() -> None:
    """If kernel_scale triples, the time of kernels triples and the time per request does not change."""
    base = with_host(request_s=0.25)
    tripled = replace(base, kernel_scale={"a100-80gb": 3.0})
    assert ttft_s(tripled) - 0.25 == pytest.approx(3 * (ttft_s(base) - 0.25))
    assert ttft_s(replace(base, kernel_scale={"other": 3.0})) == pytest.approx(ttft_s(tripled))
    assert ttft_s(replace(base, kernel_scale={"h100": 2.0, "h200": 4.5})) == pytest.approx(ttft_s(tripled))


def test_a_scale_of_other_gpus_is_less_sure_and_said() -> None:
    engine = replace(NOTHING, kernel_scale={"h100": 1.2}, spread={"kernel_scale": 0.03, "other_gpu": 0.04})
    assert (engine.scale_log_sd("h100"), engine.scale_log_sd("a100-80gb")) == (0.03, pytest.approx(0.05))
    answer = kvrsim.simulate(**ALONE, profile="a100-flash", engine=engine)
    assert any("was measured on h100" in warning and "1.20 times" in warning for warning in answer.warnings)
    known = replace(engine, kernel_scale={"a100-80gb": 1.2})
    sure = kvrsim.simulate(**ALONE, profile="a100-flash", engine=known)
    assert sure.ttft_s == pytest.approx(answer.ttft_s)
    assert answer.ttft_high_s > sure.ttft_high_s


def test_pieces_of_a_pipeline_pay_a_step_each() -> None:
    about = {"gpus": 2, "strategy": "pp", "ctx": 8192}
    few, many = ([4096] * 2, [512] * 16)
    added = [
        ttft_s(with_host(step_s=0.5), **about, partition=pieces) - ttft_s(NOTHING, **about, partition=pieces)
        for pieces in (few, many)
    ]
    assert added[0] == pytest.approx(3 * 0.5, rel=0.05)  # two pieces and one more stage
    assert added[1] == pytest.approx(17 * 0.5, rel=0.05)


def test_a_decode_step_reads_the_weights_once_more() -> None:
    decodes = replace(NOTHING, decode_step=True)
    step_s = ttft_s(decodes) - ttft_s(NOTHING)
    weights_s = 13.5e9 / 2.039e12
    assert weights_s < step_s < 3 * weights_s
    assert ttft_s(decodes, ctx=1) < 1.05 * step_s, "a prompt of one token has no prefill"


def test_collectives_take_more_where_there_are_some() -> None:
    about, slow = {"gpus": 2, "strategy": "tp"}, with_host(collective_s=0.1)
    assert ttft_s(slow, **about) - ttft_s(NOTHING, **about) == pytest.approx((2 * 32 + 1) * 0.1)
    assert ttft_s(slow) == ttft_s(NOTHING)


def test_a_profile_names_its_engine_and_none_stands_for_its_own_host() -> None:
    profile = load_profile("a100-flash")
    own = HostRates(layer_s=0.5, gather_piece_s=0.0)
    named = replace(profile, engine="serving", host=own)
    assert kvrsim.simulate(**ALONE, profile=named).question.engine == "serving"
    assert kvrsim.simulate(**ALONE, profile=named, engine=NO_ENGINE).ttft_s >= 32 * own.layer_s
    inline = replace(profile, engine=with_host(request_s=5.0))
    assert kvrsim.simulate(**ALONE, profile=inline).ttft_s > 5.0


def test_a_decode_step_behind_a_long_context_reads_its_keys_once() -> None:
    """Llama 2 7B has 0.5 MiB of K and V per token; an A100 reads them at 1.6 TB/s."""
    decodes = replace(NOTHING, decode_step=True)
    short_s, long_s = (ttft_s(decodes, ctx=ctx) - ttft_s(NOTHING, ctx=ctx) for ctx in (1024, 17408))
    assert long_s - short_s == pytest.approx(16384 * 2**19 / 1.631e12, rel=0.05)


def test_launches_are_added_to_the_kernels() -> None:
    """launch_s makes each kernel longer for any length of context; layer_s is hidden by kernels."""
    for ctx in (1024, 8192):
        kernels_s = ttft_s(NOTHING, ctx=ctx)
        added = [ttft_s(with_host(launch_s=seconds), ctx=ctx) - kernels_s for seconds in (1e-6, 2e-6)]
        assert added[1] == pytest.approx(2 * added[0])
        assert added[0] > 32 * 8e-6
        assert ttft_s(with_host(layer_s=1e-6), ctx=ctx) - kernels_s < 0.1 * added[0]


def test_a_model_type_has_a_factor_on_launches_alone() -> None:
    engine = replace(with_host(launch_s=1e-5, request_s=1e-3), model_types={"llama": 2.0})
    assert engine.host_of("llama") == replace(engine.host, launch_s=2e-5)
    assert engine.host_of("mixtral") == engine.host
    engine = replace(engine, host=replace(engine.host, collective_s=1e-5), mixtures=3.0, systems={"h200": 1.5})
    assert engine.host_of("mixtral", is_mixture=True).launch_s == pytest.approx(3e-5)
    slow = engine.host_of("llama", gpu="h200")
    assert (slow.launch_s, slow.collective_s) == pytest.approx((3e-5, 1.5e-5))
    assert engine.without_factors(slow).host_of("llama", gpu="h200") == slow
    assert ttft_s(engine) == pytest.approx(ttft_s(with_host(launch_s=2e-5, request_s=1e-3)))


def test_what_was_never_measured_is_said() -> None:
    known = kvrsim.simulate(**ALONE | {"cluster": "h100-nvlink", "model": "llama-3.1-8b"}, engine="vllm")
    other = kvrsim.simulate(**ALONE | {"cluster": "h100-nvlink", "model": "qwen3-8b"}, engine="vllm")
    assert {getattr(note, "code", "") for note in other.warnings} >= {"engine, model"}
    assert "engine, model" not in {getattr(note, "code", "") for note in known.warnings}
    engine = load_engine("vllm")
    assert engine.unknowns("qwen3", "l40s", 100) == ("model", "gpu", "short")


@pytest.mark.parametrize(
    ("version", "scale", "is_other"),
    [
        ("0.19", 1.2, False),
        ("0.19.0", 1.2, False),
        ("0.20.1", 1.2, True),
        ("0.1", 0.9, True),
        ("nightly-dev", 1.0, True),
    ],
)
def test_a_version_is_the_measured_one_or_the_nearest(version: str, scale: float, is_other: bool) -> None:
    engine = replace(NOTHING, kernel_scale={"other": 1.0}, versions={"0.15.1": 0.9, "0.19.0": 1.2}).at_version(version)
    assert (engine.kernel_scale["other"], engine.is_other_version) == (pytest.approx(scale), is_other)


def test_no_deviation_is_beyond_a_float(tmp_path: Path) -> None:
    """An end of an interval is the exponential of a standard deviation."""
    load_engine("vllm-2023").write(tmp_path / "wide.json")
    content = json.loads((tmp_path / "wide.json").read_text())
    content["fit"]["log_sd"] = 1e30
    (tmp_path / "wide.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="log_sd"):
        load_engine(tmp_path / "wide.json")


def test_kernels_hide_a_share_of_the_launches() -> None:
    """A layer takes launches and kernels, less the hidden share of the shorter ones; all hidden: the longer ones."""
    layers_s = {
        (launch_s, share): ttft_s(with_host(launch_s=launch_s, hidden_share=share))
        for launch_s in (0.0, 2e-6, 1e-3)
        for share in (0.0, 0.3, 1.0)
    }
    assert layers_s[0.0, 1.0] == layers_s[0.0, 0.0]
    few_s = layers_s[2e-6, 0.0] - layers_s[0.0, 0.0]
    assert layers_s[2e-6, 1.0] == pytest.approx(layers_s[0.0, 0.0], rel=1e-9), "kernels hide all launches"
    assert layers_s[2e-6, 0.0] - layers_s[2e-6, 0.3] == pytest.approx(0.3 * few_s)
    hidden = [layers_s[1e-3, 0.0] - layers_s[1e-3, share] for share in (0.3, 1.0)]
    assert hidden[0] == pytest.approx(0.3 * hidden[1]), "launches hide the kernels of the layers"
    assert hidden[1] < layers_s[0.0, 0.0]


def test_older_builds_launch_as_they_did() -> None:
    newest = load_engine("sglang")
    older = load_engine("sglang@0.5.9")
    assert newest.older is not None
    assert older.host.hidden_share == newest.older.hidden_share < newest.host.hidden_share == 1.0
    factor = newest.versions["0.5.9"]
    assert older.host.launch_s == pytest.approx(factor * newest.host.launch_s)
    assert load_engine("sglang@0.5.16").host == newest.host
    assert load_engine("sglang@nightly").host == newest.host
    assert is_before("0.5.9", "0.5.10")
    assert not is_before("0.5.10", "0.5.10")
