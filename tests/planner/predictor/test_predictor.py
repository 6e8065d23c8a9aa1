"""Predictors equal the simulator at their knots, are close between them, and refuse values outside."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

import kvrsim
from kvrsim.cli import main as cli
from kvrsim.errors import InputError
from planner.predictor.predictor import TtftPredictor

READER = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "read_predictor.py"))["predict"]
ASKED = {"ctx": "8k", "gpus": 4, "batch": 3, "model": "llama-3-8b", "cluster": "h100-nvlink"}
PREFILLS = [(8192, 0, 1), (5000, 1234, 2), (8000, 7990, 3), (513, 500, 1)]


@pytest.fixture(scope="module")
def predictor() -> TtftPredictor:
    return kvrsim.build_predictor(strategy="tp", **ASKED)


def simulated_s(ctx: int, cached_prefix: int, batch: int, strategy: str = "tp", **others: object) -> float:
    options = ASKED | {"ctx": ctx, "cached_prefix": cached_prefix, "batch": batch} | others
    return kvrsim.simulate(strategy=strategy, **options).ttft_s


def test_knots_are_simulated_prefills(predictor: TtftPredictor) -> None:
    for new in (predictor.new_tokens[0], predictor.new_tokens[7]):
        for prefix in predictor.cached_prefix[:2]:
            for batch in predictor.batch:
                result = predictor.predict(ctx=new + prefix, cached_prefix=prefix, batch=batch)
                assert result.ttft_s == pytest.approx(simulated_s(new + prefix, prefix, batch), rel=1e-5)
                assert result.ttft_low_s < result.ttft_s < result.ttft_high_s
                assert result.strategy == "tp"


@pytest.mark.parametrize(("ctx", "cached_prefix", "batch"), PREFILLS)
def test_between_knots_it_is_near_the_simulator(
    predictor: TtftPredictor, ctx: int, cached_prefix: int, batch: int
) -> None:
    result = predictor.predict(ctx=ctx, cached_prefix=cached_prefix, batch=batch)
    assert result.ttft_s == pytest.approx(simulated_s(ctx, cached_prefix, batch), rel=0.03)


def test_the_file_and_the_reader_say_the_same(predictor: TtftPredictor, tmp_path: Path) -> None:
    path = tmp_path / "ttft.json"
    predictor.write(path)
    again, plain = kvrsim.load_predictor(path), json.loads(path.read_text())
    assert again.to_dict() == predictor.to_dict()
    assert plain["question"]["model"] == "llama-3-8b"
    for ctx, cached_prefix, batch in PREFILLS:
        estimate = again.predict(ctx=ctx, cached_prefix=cached_prefix, batch=batch).to_dict()
        read = READER(plain, ctx, cached_prefix, batch)
        assert read.pop("strategy") == estimate.pop("strategy")
        assert read == pytest.approx(estimate)
    with pytest.raises(ValueError, match="context 9000"):
        READER(plain, 9000)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"ctx": 8193}, "ctx"),
        ({"ctx": 4096, "cached_prefix": 4095}, "cached_prefix"),
        ({"ctx": 4096, "batch": 4}, "batch"),
    ],
)
def test_outside_is_refused(predictor: TtftPredictor, asked: dict[str, int], named: str) -> None:
    with pytest.raises(InputError, match=f"^{named}: got .* accepted: a whole number from"):
        predictor.predict(**asked)


@pytest.mark.slow
def test_what_does_not_fit_is_not_told() -> None:
    """With tensor parallelism the weights fit in memory, but many long prompts do not."""
    near = {"model": "llama-3-70b", "gpus": 4, "cluster": "h100-nvlink", "memory_fraction": 0.55}
    result = kvrsim.build_predictor(strategy="tp", ctx="64k", batch=2, **near)
    alone, together = (most[0] for most in result.strategies[0].most_new_tokens)
    assert 0 < together < alone == 65536
    with pytest.raises(InputError, match="more do not fit"):
        result.predict(ctx=together + 1, batch=2)
    within = kvrsim.simulate(strategy="tp", ctx=together, batch=2, **near)
    over = kvrsim.simulate(strategy="tp", ctx=int(1.01 * together) + 2, batch=2, **near)
    assert (within.fits, over.fits) == (True, False)


def test_mistakes() -> None:
    with pytest.raises(InputError, match=r"^strategy: got 'kvr-p'"):
        kvrsim.build_predictor(strategy="kvr-p", **ASKED)
    with pytest.raises(InputError, match=r"^ctx: got '8'"):
        kvrsim.build_predictor(strategy="tp", **ASKED | {"ctx": 8})
    with pytest.raises(InputError, match=r"^model: got 'llama-3.1-405b'.* fits in the memory of 2 GPUs"):
        kvrsim.build_predictor(**ASKED | {"gpus": 2, "model": "llama-3.1-405b", "ctx": "1k"})


def test_a_file_that_is_none_is_refused(predictor: TtftPredictor, tmp_path: Path) -> None:
    path, content = tmp_path / "ttft.json", predictor.to_dict()
    for key, value in (("format", "another"), ("schema_version", 2), ("batch", [2, 1]), ("new_tokens", [8, 9])):
        path.write_text(json.dumps(content | {key: value}))
        with pytest.raises(InputError, match=r"^predictor .*ttft\.json: "):
            kvrsim.load_predictor(path)
    with pytest.raises(InputError, match="strategies"):
        replace(predictor, strategies=())


def test_the_interval_is_the_simulators(predictor: TtftPredictor) -> None:
    estimate = kvrsim.simulate(strategy="tp", **ASKED | {"ctx": 3000, "cached_prefix": 1000, "batch": 1})
    result = predictor.predict(ctx=3000, cached_prefix=1000)
    assert result.ttft_low_s == pytest.approx(estimate.ttft_low_s, rel=0.05)
    assert result.ttft_high_s == pytest.approx(estimate.ttft_high_s, rel=0.05)


@pytest.mark.slow
def test_best_is_the_fastest_of_its_strategies() -> None:
    result = kvrsim.build_predictor(**ASKED | {"ctx": "1k", "batch": 1, "gpus": 2})
    names = [one.strategy for one in result.strategies]
    assert len(names) > 1
    for ctx in (64, 300, 1024):
        estimate = result.predict(ctx=ctx)
        best_s = min(simulated_s(ctx, 0, 1, strategy=name, gpus=2) for name in names)
        assert estimate.ttft_s == pytest.approx(best_s, rel=0.03)


def test_check_says_whether_a_predictor_still_holds(
    predictor: TtftPredictor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predictor.write(tmp_path / "ttft.json")
    lengths = (600, 2000, 5000, 8000)

    def check(factor: float, unit: float = 1e3, name: str = "ttft") -> tuple[int, dict[str, object]]:
        rows = [f"{tokens},{factor * unit * predictor.predict(ctx=tokens).ttft_s}" for tokens in lengths]
        (tmp_path / "log.csv").write_text("\n".join([f"prompt_tokens,{name}", *rows, "90000,1", ""]))
        code = cli.main(["predictor", "check", str(tmp_path / "ttft.json"), str(tmp_path / "log.csv"), "--json"])
        return code, json.loads(capsys.readouterr().out)

    for unit, name in ((1.0, "ttft_s"), (1e3, "ttft_ms"), (1e3, "ttft"), (1.0, "ttft")):
        code, content = check(1.05, unit, name)
        assert (code, content["ok"], content["n"]) == (0, True, 4)
        assert content["median_ape"] == pytest.approx(1 - 1 / 1.05, rel=1e-6)
        assert "1 row left out" in str(content["warnings"])
    code, content = check(2.0)
    assert (code, content["ok"]) == (1, False)
