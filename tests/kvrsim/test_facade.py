"""The facade: its names, lazy loading, and accepted arguments."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
import tomllib
from inspect import signature
from pathlib import Path
from typing import Literal, get_type_hints

import numpy as np
import pytest

import kvrsim
from kvrsim.arguments import ModelSource, ScenarioArgs, Seconds, options_of
from tests.building.snapshot import assert_recorded
from tests.building.stubs import PATH, accepted_type, stub_file

ROOT = Path(__file__).resolve().parents[2]


def test_names_are_recorded() -> None:
    assert_recorded(ROOT / "tests" / "kvrsim" / "names.json", {"kvrsim": list(kvrsim.__all__)})
    for name in kvrsim.__all__:
        assert getattr(kvrsim, name) is not None
        assert name in dir(kvrsim)
    with pytest.raises(AttributeError, match="nonsense"):
        kvrsim.nonsense  # noqa: B018


def test_the_stub_of_each_function_has_the_types_that_are_declared() -> None:
    assert stub_file() == PATH.read_text("utf-8"), "python -m tests.building.stubs writes it"


def test_types_say_what_is_given_not_what_it_becomes() -> None:
    assert accepted_type(Seconds | None) == "float | str | None"
    assert accepted_type(Literal["a", "b"]) == "Literal['a', 'b']"
    assert accepted_type(ModelSource) == "str | PathLike[str] | ModelSpec"


def test_functions_take_what_is_declared() -> None:
    """Signatures and docstrings of the functions have the fields and defaults of ScenarioArgs."""
    declared = {name: one.default for name, one in options_of(ScenarioArgs).items() if name != "ctx"}
    for function in (kvrsim.make_scenario, kvrsim.plan, kvrsim.simulate):
        parameters = signature(function).parameters
        assert {name: parameters[name].default for name in declared} == declared
        assert all(f"    {name} : " in (function.__doc__ or "") for name in ("ctx", *declared))


FUNCTIONS = [
    *("plan", "simulate", "build_table", "build_predictor", "capacity", "make_scenario", "map_strategies", "calibrate")
]


@pytest.mark.parametrize("name", [name for name in kvrsim.__all__ if inspect.isfunction(getattr(kvrsim, name))])
def test_signatures_are_full_and_hints_resolve(name: str) -> None:
    parameters = signature(getattr(kvrsim, name)).parameters
    assert not any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters.values())
    assert {*get_type_hints(getattr(kvrsim, name))} == {*parameters, "return"}


@pytest.mark.parametrize("name", [*FUNCTIONS, "confirm"])
def test_a_wrong_call_names_the_function(name: str) -> None:
    needed = {"ctx": 1, "model": "a", "cluster": "b", "strategy": "c", "requests": "d", "slo_ttft": 1}
    needed |= {"profile": "e", "prefills": "f"}
    given = {key: value for key, value in needed.items() if key in signature(getattr(kvrsim, name)).parameters}
    with pytest.raises(TypeError, match=rf"^{name}\(\): got an unexpected keyword .*'modell'; did you mean model\?$"):
        getattr(kvrsim, name)(**given, modell=1)
    with pytest.raises(TypeError, match=rf"^{name}\(\): too many positional"):
        getattr(kvrsim, name)(1)


def test_what_ships_is_listed() -> None:
    names = {"llama-7b": kvrsim.models, "h100-flash": kvrsim.profiles, "h100-nvlink": kvrsim.clusters}
    assert all(name in function() for name, function in names.items())
    assert "vllm" in kvrsim.engines()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_run(name: str) -> None:
    """The docstring has numpydoc sections, and its example prints the documented output."""
    function = getattr(kvrsim, name)
    assert all(title in function.__doc__ for title in ("Parameters", "Returns", "Raises", "InputError", "Examples"))
    (example,) = doctest.DocTestFinder(recurse=False).find(function, name, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, kvrsim; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert not [name for name in loaded if name.startswith(("numpy", "kvrsim.", "planner"))]


def test_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert kvrsim.__version__ == project["version"]


def test_numbers_and_text_mean_the_same() -> None:
    text, notes = kvrsim.make_scenario(
        ctx="4k", gpus="4", link_bandwidth="10GB/s", link_latency="5us", batch="2", cached_prefix="1k"
    )
    numbers, same_notes = kvrsim.make_scenario(
        ctx=np.int64(4096), gpus=4, link_bandwidth=1e10, link_latency=5e-6, batch=2, cached_prefix=1024
    )
    assert text == numbers
    assert notes == same_notes


def test_names_paths_and_objects_mean_the_same(tmp_path: Path) -> None:
    profile, model, cluster = (kvrsim.load_profile("a100-eager"), kvrsim.load_model("llama-7b"), kvrsim.load_cluster())
    profile.write(tmp_path / "profile.json")
    by_name, _ = kvrsim.make_scenario(ctx=512, profile="a100-eager", model="llama-7b", cluster="a100-nvlink")
    by_object, _ = kvrsim.make_scenario(ctx=512, profile=profile, model=model, cluster=cluster)
    by_path, _ = kvrsim.make_scenario(ctx=512, profile=tmp_path / "profile.json")
    assert by_name == by_object == by_path


def test_plan() -> None:
    seen: list[tuple[float, float | None, str]] = []
    plan = kvrsim.plan(
        ctx="1k",
        gpus=2,
        strategies=["single", "tsp", "kvr-e", "kvr-s"],
        on_progress=lambda *progress: seen.append(progress),
        timeline=True,
    )
    assert isinstance(plan, kvrsim.Plan)
    assert plan.feasible
    assert sum(plan.best.partition) == 1024
    assert isinstance(plan.timeline, kvrsim.Timeline)
    assert seen
    assert [one.strategy for one in plan] == [one.strategy for one in plan.strategies]
    assert [len(plan), "tsp" in plan, "ring" in plan, plan["tsp"].strategy] == [4, True, False, "tsp"]
    assert len(plan.to_frame()) == 4
    assert max(len(repr(one)) for one in (plan, plan.best, plan.question.cluster)) < 200


def test_frames_have_scalar_cells() -> None:
    """Cells have the largest wait and memory of all ranks; lists become text separated by commas."""
    plan = kvrsim.plan(ctx="1k", gpus=2, strategies=["kvr-e", "tp"])
    for result in (plan, kvrsim.simulate(strategy="kvr-e", ctx="1k", gpus=2), kvrsim.build_table(ctx="1k", gpus=2)):
        cells = [cell for row in result.to_frame().to_dict("records") for cell in row.values()]
        assert not any(isinstance(cell, list | tuple | dict) for cell in cells)
    row = plan.to_frame().set_index("strategy").loc["kvr-e"]
    assert row["partition"] == "512,512"
    assert row["peak_bytes"] == max(rank.total for rank in plan["kvr-e"].memory)
    assert row["wait_s"] == max(plan["kvr-e"].wait_s)


def test_frames_of_several_questions_can_be_joined() -> None:
    """Each row says what was asked."""
    pandas = pytest.importorskip("pandas")
    questions = [{"ctx": ctx, "gpus": gpus, "link_bandwidth": 1e10} for ctx in (1024, 2048) for gpus in (2, 4)]
    plans = [kvrsim.plan(strategies="tsp,kvr-e", **question) for question in questions]
    frame = pandas.concat([plan.to_frame() for plan in plans])
    asked = frame.groupby(["model", "context_len", "num_gpus", "link_bandwidth_bytes_per_s"]).size()
    assert sorted(asked.index) == sorted(("llama-7b", one["ctx"], one["gpus"], 1e10) for one in questions)
    assert set(asked) == {2}
    ranks = kvrsim.simulate(strategy="tsp", **questions[1]).to_frame()
    assert set(ranks["num_gpus"]) == {4}
    assert set(ranks["context_len"]) == {1024}
