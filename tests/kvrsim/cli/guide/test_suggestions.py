"""Wrong command lines: one line, exit code 2, and what was meant."""

from __future__ import annotations

import shlex

import pytest

from kvrsim.cli import main as cli
from kvrsim.cli.guide.nearest import nearest, respelled
from kvrsim.cli.guide.values import shipped
from kvrsim.engine import builtin_engines
from kvrsim.hardware import builtin_clusters, builtin_gpus
from kvrsim.kernels.profile import builtin_profiles
from kvrsim.model.load import builtin_models
from kvrsim.strategies import STRATEGIES

FLEET = "capacity --requests synthetic:poisson,rate=4"
MEANT = {
    "plna --ctx 8k": "kvrsim plan",
    "plans --ctx 8k": "kvrsim plan",
    "predict --ctx 8k": "kvrsim plan",
    "sim --strategy tp --ctx 8k": "kvrsim simulate",
    "tables build": "kvrsim table build",
    "table look table.json": "kvrsim table lookup",
    "list models": "kvrsim models list",
    "models ls": "kvrsim models list",
    "gpus list": "kvrsim clusters list",
    "model show llama-3-8b": "kvrsim models show llama-3-8b",
    "models llama-3-8b": "kvrsim models show llama-3-8b",
    "show llama3-8b": "kvrsim models show llama-3-8b",
    "version": "kvrsim --version",
    "8k": "kvrsim plan --ctx 8k",
    "--ctx 8k": "kvrsim plan --ctx",
    "plan 8k": "--ctx 8k",
    "plan 8k 4": "--ctx 8k --gpus 4",
    "plan ctx 8k": "--ctx 8k",
    "plan —ctx 8k": "--ctx 8k",  # a dash that a text processor made longer
    "plan gpus=4 --ctx 8k": "--gpus 4",
    "plan llama-3-8b --ctx 8k": "--model llama-3-8b",
    "simulate kvr-s --ctx 8k": "--strategy kvr-s",
    "capacity trace.csv --slo-ttft 2s": "--requests trace.csv",
    "plan --ctx 16k tokens": "--ctx 16k",
    "plan --ctx 8k --link-bandwidth 10 GB/s": "--link-bandwidth 10GB/s",
    "plan --tokens 8k": "--ctx",
    "plan --context 8k": "--ctx",
    "plan --seq-len 8k": "--ctx",
    "plan --ctx 8k --gpu 4": "--gpus",
    "plan --ctx 8k -gpus 4": "--gpus",
    "plan --ctx 8k --strategy tp": "--strategies",
    "plan --ctx 8k --slo-ttft 2s": "kvrsim capacity --slo-ttft",
    f"{FLEET} --slo 2s": "--slo-ttft",
    "plan --ctx 8k --model llama3-8b": "llama-3-8b",
    "plan --ctx 8k --model meta-llama/Llama-3-8B": "llama-3-8b",
    "models show llama3": "llama-3-8b",
    "plan --ctx 8k --cluster h100-nvlnk": "h100-nvlink",
    "plan --ctx 8k --cluster 8xH100": "h100-nvlink",
    "plan --ctx 8k --profile H100_flash": "h100-flash",
    "plan --ctx 8k --engine vllm": "vllm-2023",
    "plan --ctx 8k --strategies KVR-S,tsp": "kvr-s",
    "simulate --ctx 8k --strategy kvrs": "kvr-s",
    "run --ctx 1k --strategy tensor-parallel": "tp",
    "plan --ctx 8k --model h100-nvlink": "--cluster h100-nvlink",
    "plan --ctx 8k --topology ring": "--strategies ring",
    "plan help": "kvrsim help plan",
    "plan --ctx 8k --csv": "--format csv",
    "plan --ctx 8k --format json": "--json",
    "capacity --requests poisson,rate=4 --slo-ttft 2s": "synthetic:poisson,rate=4",
    "plan --ctx 8k --dtype bfloat16": "bf16",
    "plan --ctx 8k --emit trt-llm": "trtllm",
    "plan --ctx 16,384": "16384",
    "plan --ctx '16k tokens'": "16k",
    "plan --ctx 8k --gpus 8gpus": "8",
    "plan --ctx 8k --link-bandwidth 10GBps": "10GB/s",
    "plan --ctx 8k --link-bandwidth '10 Gbit'": "10Gb/s",
    "plan --ctx 8k --link-bandwidth 10": "10GB/s or 10Gb/s",
    "plan --ctx 8k --link-latency 5": "5us",
    "plan --ctx 8k --memory-fraction 90": "0.9",
    f"{FLEET} --slo-ttft 2": "2s",
    f"{FLEET} --slo-ttft 500": "500ms",
    f"{FLEET} --slo-ttft 2s --percentile p99": "99",
    "map --ctx 1k-32k": "1k:32k:x2",
}


@pytest.mark.parametrize("line", MEANT)
def test_what_was_meant(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvrsim: error: ")
    assert err.count("\n") == 1
    assert "accepted: " in err
    assert len(err) < 300
    assert err.endswith(f"; did you mean {MEANT[line]}?\n")


@pytest.mark.parametrize(
    "line", [line for line, meant in MEANT.items() if meant.startswith("kvrsim ") and " show " in meant]
)
def test_command_lines_that_were_meant_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*MEANT[line].split()[1:], "--json"]) == 0


@pytest.mark.parametrize(
    "line",
    [
        "plan --frobnicate",
        "frobnicate",
        "plan --ctx 8k more",
        "plan --ctx 8k --model gpt-99",
        "plan --ctx sixteen",
        "plan --ctx 8k --attention flash --profile a100-eager",  # known, and yet refused
        "plan --ctx 8k --attention flesh --profile a100-eager",  # flash would be refused
        "plan --ctx 8k --link-bandwidth 0GB/s",
    ],
)
def test_nothing_is_suggested_where_nothing_is_near(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(line)) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_an_option_that_took_the_next_one_for_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--ctx", "--gpus", "4"]) == 2
    assert capsys.readouterr().err.startswith("kvrsim: error: --ctx: got nothing, accepted: LEN (")


def test_names_that_ship() -> None:
    assert shipped("models") == builtin_models()
    assert shipped("clusters") == builtin_clusters()
    assert shipped("profiles") == builtin_profiles()
    assert shipped("engines") == builtin_engines()
    assert set(shipped("gpus")) == set(builtin_gpus())
    assert shipped("strategies") == tuple(STRATEGIES)


@pytest.mark.parametrize("kind", ["models", "clusters", "profiles", "engines", "strategies"])
def test_a_name_in_another_spelling_is_found(kind: str) -> None:
    for name in shipped(kind):
        assert nearest(name, shipped(kind)) is None  # nothing to suggest
        assert nearest(name.upper(), shipped(kind)) == name
        assert nearest(name.replace("-", "_") + "_", shipped(kind)) == name
        assert nearest(f"owner/{name}-Instruct", shipped(kind)) == name


@pytest.mark.parametrize(
    ("text", "metavar", "meant"),
    [
        ("5 usec", "TIME", "5us"),
        ("1h", "TIME", "3600s"),
        ("30 milliseconds", "TIME", "30ms"),
        ("100 GB/sec", "RATE", "100GB/s"),
        ("10gb/s", "RATE", "10GB/s or 10Gb/s"),
        ("400gbps", "RATE", "400Gb/s"),
        ("64mb", "SIZE", "64MB"),
        ("16kB", "LEN", "16k"),
        ("16Ki", "LEN", "16k"),
        ("four", "N", "4"),
        ("0.99", "P", "99"),
        ("fast", "RATE", None),
        ("nan", "TIME", None),
        ("1.0001k", "LEN", None),
    ],
)
def test_quantities(text: str, metavar: str, meant: str | None) -> None:
    assert respelled(text, metavar, "--option") == meant
