"""The Python API accepts natural types of arguments, and an error names the parameter."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvrsim
from kvrsim import arguments
from kvrsim.arguments import MOST_VALUES, Arguments, ScenarioArgs, ScenariosArgs, TargetArgs, option_of, options_of
from kvrsim.choices import SECTIONS
from kvrsim.errors import InputError

SMALL: dict[str, Any] = {"ctx": 512, "gpus": 2, "profile": "roofline"}


def test_one_strategy_is_a_name_and_not_its_letters() -> None:
    plans = [kvrsim.plan(**SMALL, strategies=given) for given in ("tsp", ["tsp"], ("tsp",), iter(["tsp"]))]
    assert [[result.strategy for result in plan.strategies] for plan in plans] == [["tsp"]] * 4
    both = kvrsim.plan(**SMALL, strategies="tsp, kvr-e")
    assert {result.strategy for result in both.strategies} == {"tsp", "kvr-e"}
    assert len(kvrsim.plan(**SMALL, strategies="all").strategies) > 5


@pytest.mark.parametrize(
    "given", [np.array([256, 256]), (np.int64(256), 256), iter([256, 256]), np.array([256] * 2, "u2")]
)
def test_whole_numbers_of_numpy_are_numbers(given: Any) -> None:
    result = kvrsim.simulate(**SMALL, strategy="kvr-e", partition=given)
    assert json.loads(json.dumps(result.to_dict()))["partition"] == [256, 256]


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        *(
            ("partition", value)
            for value in ([300.5, 211.5], [256.0, 256.0], [[256, 256]], np.array([[256, 256]]), 512)
        ),
        *(("partition", value) for value in (np.array(512), [True, 511], {"256": 1}, [256, None], itertools.count())),
        *(("seed", value) for value in (-1, 2**32, 1.5, True, "x", None, np.array([1, 2]))),
        *(("strategy", value) for value in (b"tsp", ["tsp"], 3, None)),
        *(("ctx", value) for value in (1j, [512], None, 512.0, np.array([512]), (512 for _ in "a"))),
        *(("link_bandwidth", value) for value in (1j, [1e10], 10**400, np.array([1e9, 1e9]), True)),
        *(("model", value) for value in (7, b"llama-7b", ["llama-7b"], object())),
        *(("timeline", value) for value in (1, "yes", np.array([True, False]))),
        *(("noise", value) for value in (7, ["paper"], {"jitter": 1})),
        *(("samples", value) for value in (0, 1.5, "x", np.array([1, 2]))),
    ],
)
def test_wrong_types_name_the_parameter(parameter: str, value: Any) -> None:
    with pytest.raises(kvrsim.InputError) as caught:
        kvrsim.simulate(**{**SMALL, "strategy": "kvr-e", parameter: value})
    assert caught.value.parameter == parameter
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "parameter", "wrong"),
    [
        (kvrsim.plan, "strategies", {"strategies": [["tsp"]]}),
        (kvrsim.plan, "on_progress", {"on_progress": 7}),
        (kvrsim.build_table, "ctx", {"ctx": [1.5]}),
        (kvrsim.build_table, "batch", {"batch": 1j}),  # an argument of make_scenario
        (kvrsim.map_strategies, "gpus", {"gpus": [[2]]}),
        (kvrsim.map_strategies, "link_bandwidths", {"link_bandwidths": 1e10}),
        (kvrsim.capacity, "group_sizes", {"requests": "x.csv", "slo_ttft": 1, "group_sizes": [1.5]}),
        (kvrsim.capacity, "requests", {"requests": 7, "slo_ttft": 1}),
    ],
)
def test_every_function_checks(call: Callable[..., Any], parameter: str, wrong: dict[str, Any]) -> None:
    scalar = {"ctx": 512, "gpus": 2} if call is kvrsim.plan else {"ctx": [512], "gpus": [2]}
    fleet = {"model": "llama-7b", "cluster": "a100-nvlink"}
    given = fleet | wrong if call is kvrsim.capacity else scalar | {"profile": "roofline"} | wrong
    with pytest.raises(kvrsim.InputError) as caught:
        call(**given)
    assert caught.value.parameter == parameter


def test_texts_and_numbers_may_be_mixed_in_lists() -> None:
    table = kvrsim.build_table(ctx=["512", 1024, np.int64(256)], gpus=np.array([2]), profile="roofline")
    assert [entry.context_len for entry in table.entries] == [256, 512, 1024]
    places = kvrsim.map_strategies(ctx=["512", np.int64(1024)], gpus=(2,), profile="roofline", strategies="tsp")
    assert {point.context_len for point in places.points} == {512, 1024}


def test_lists_without_end_are_refused() -> None:
    with pytest.raises(kvrsim.InputError, match=f"at most {MOST_VALUES} values"):
        kvrsim.plan(**SMALL, strategies=itertools.repeat("tsp"))


GROUPS = [group for group in vars(arguments).values() if isinstance(group, type) and issubclass(group, Arguments)]
DECLARED = [(name, one) for group in GROUPS for name, one in options_of(group).items()]


def test_every_check_refuses_an_object_of_no_use() -> None:
    assert len(DECLARED) > 40
    for name, option in DECLARED:
        with pytest.raises(kvrsim.InputError):
            option.check(object(), name)


def test_every_field_is_described_with_the_values_that_its_check_accepts() -> None:
    for name, option in DECLARED:
        assert option.help.endswith("."), name
        assert option.section in SECTIONS
        if re.fullmatch(r"[a-z0-9-]+(\|[a-z0-9-]+)+", option.metavar) and option.check is not arguments.text:
            assert [option.check(word, name) for word in option.metavar.split("|")]
            with pytest.raises(kvrsim.InputError, match=", ".join(option.metavar.split("|"))):
                option.check("nonsense", name)


@pytest.mark.parametrize("several", ["32k,64k,128k", "32k-128k", "1k:64k:x4"])
def test_a_question_of_one_context_names_the_command_for_several(several: str) -> None:
    with pytest.raises(InputError, match=r"ctx: got .*kvrsim map --ctx"):
        ScenarioArgs(ctx=several)


@pytest.mark.parametrize(("share", "cached"), [("0%", 0), ("90%", 58982), ("12.5%", 8192)])
def test_a_share_of_the_context_may_be_cached(share: str, cached: int) -> None:
    assert ScenarioArgs(ctx="64k", cached_prefix=share).cached_prefix == cached


@pytest.mark.parametrize("share", ["100%", "-1%", "%", "a%"])
def test_a_share_that_leaves_no_token_is_refused(share: str) -> None:
    with pytest.raises(InputError, match="cached_prefix: got"):
        ScenarioArgs(ctx="64k", cached_prefix=share)


def test_a_share_needs_one_context() -> None:
    with pytest.raises(InputError, match=r"cached_prefix: got .*single context"):
        ScenariosArgs(ctx="1k,2k", cached_prefix="50%")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e308])
@pytest.mark.parametrize("name", ["link_latency", "link_bandwidth"])
def test_numbers_have_the_limits_of_text(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{name}: got"):
        ScenarioArgs(ctx="1k", **{name: value})


def test_a_target_is_a_finite_time() -> None:
    for value in (float("nan"), 0.0, -1.0):
        with pytest.raises(InputError, match="slo: got"):
            TargetArgs(slo=value)
    with pytest.raises(InputError, match="link_bandwidth: got"):
        ScenarioArgs(ctx="1k", link_bandwidth=5e-324)
    assert ScenarioArgs(ctx="1k", link_latency=0).link_latency == 0


def test_a_group_is_frozen() -> None:
    target = TargetArgs(slo="2s")
    with pytest.raises(AttributeError, match="TargetArgs is frozen"):
        target.slo = 3.0
    assert target.slo == 2.0


@pytest.mark.parametrize("annotation", [object, list[str], int, int | str])
def test_an_argument_says_how_it_is_read(annotation: Any) -> None:
    with pytest.raises(TypeError, match=r"needs Read\(function\)"):
        option_of(annotation)
