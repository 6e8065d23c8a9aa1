"""Colours: every strategy and operation has one; colour-blind readers can distinguish families and operations."""

from __future__ import annotations

from itertools import combinations
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest

from kvrsim.program import Payload, WorkKind
from kvrsim.strategies import STRATEGIES
from kvrsim.views.style import (
    FAINT_TEXT,
    FAMILIES,
    GROUND,
    OPERATIONS,
    STRATEGY_COLOURS,
    TEXT,
    Colour,
    Ground,
    operation_of,
    strategy_colour,
    text_on,
)

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB for each kind of colour blindness.
SEEN = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
# Ottosson 2020, OKLab: the smallest visible distance is 0.02.
LMS = [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.62997870]]
LAB = [
    [0.21045426, 0.79361779, -0.00407205],
    [1.9779985, -2.42859221, 0.45059371],
    [0.0259040, 0.78277177, -0.80867577],
]
APART = 0.055
BETWEEN, WITHIN = 0.07, 0.04  # least distance between two families, and within a family
OPAQUE = {name: operation.colour for name, operation in OPERATIONS.items() if name != "waiting"}  # waiting is hatched
HYBRIDS = ["tp2+kvr-s", "tp8+ring", "pp4", "pp2+cp4", "tp2+pp2-s", "tp4+pp2+cp2", "mine"]


def linear(colour: str) -> npt.NDArray[np.float64]:
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.asarray(np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4))


def seen_as(colour: str, sight: str) -> npt.NDArray[np.float64]:
    light = np.clip(np.array(SEEN[sight]) @ linear(colour), 0, 1)
    return np.asarray(np.array(LAB) @ np.cbrt(np.array(LMS) @ light))


def contrast(colour: str, ground: str) -> float:
    """Contrast by the definition of WCAG 2."""
    lights = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(one)) + 0.05 for one in (colour, ground))
    return lights[1] / lights[0]


@pytest.mark.parametrize("sight", SEEN)
@pytest.mark.parametrize("ground", get_args(Ground))
def test_operations_differ_for_everyone(ground: Ground, sight: str) -> None:
    distances = distances_of(OPAQUE, ground, sight)
    assert {pair: distance for pair, distance in distances.items() if distance < APART} == {}


@pytest.mark.parametrize("sight", SEEN)
@pytest.mark.parametrize("ground", get_args(Ground))
def test_families_of_strategies_differ_for_everyone(ground: Ground, sight: str) -> None:
    """Two strategies of two families differ more than is needed for two of one family."""
    family_of = {name: family for family, members in FAMILIES.items() for name in members}
    for (one, other), distance in distances_of(STRATEGY_COLOURS, ground, sight).items():
        assert distance >= (WITHIN if family_of[one] == family_of[other] else BETWEEN), (one, other)


@pytest.mark.parametrize("ground", get_args(Ground))
def test_labels_on_strategies_are_readable_and_no_strategy_is_nearly_black(ground: Ground) -> None:
    for name in (*STRATEGY_COLOURS, *HYBRIDS):
        colour = strategy_colour(name).on(ground)
        assert contrast(text_on(colour), colour) >= 4.5, name
        if name in STRATEGY_COLOURS:
            assert contrast(colour, "#000000") >= 3, name


def distances_of(table: dict[str, Colour], ground: Ground, sight: str) -> dict[tuple[str, str], float]:
    """Distance of each pair of colours, in OKLab."""
    seen = {name: seen_as(colour.on(ground), sight) for name, colour in table.items()}
    return {pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in combinations(seen, 2)}


@pytest.mark.parametrize("ground", get_args(Ground))
def test_colours_stand_out_from_the_ground(ground: Ground) -> None:
    """The contrast is at least 2.5 to 1 for shapes, whose names or legends are texts, and 4.5 to 1 for text."""
    shapes = {**STRATEGY_COLOURS, **OPAQUE, **{name: strategy_colour(name) for name in HYBRIDS}}
    assert {name for name, one in shapes.items() if contrast(one.on(ground), GROUND.on(ground)) < 2.5} == set()
    assert all(contrast(one.on(ground), GROUND.on(ground)) >= 4.5 for one in (TEXT, FAINT_TEXT))


def test_every_strategy_has_one_colour() -> None:
    assert set(STRATEGY_COLOURS) == {name for name, strategy in STRATEGIES.items() if strategy.colour is not None}
    same = {"cp4": "zigzag", "tp4": "tp", "pp4": "pp", "pp4-s": "pp-s", "pp": "pp"}
    assert all(strategy_colour(name) == STRATEGY_COLOURS[of] for name, of in same.items())
    others = [
        strategy_colour(name) for name in ("tp2+kvr-s", "tp4+kvr-s", "tp8+ring", "pp2+cp4", "tp2+pp2+cp2", "mine")
    ]
    shipped = [strategy_colour(name) for name in STRATEGIES]
    assert len({*others, *shipped}) == len(others) + len(shipped)


def test_every_span_has_an_operation() -> None:
    assert all(operation_of("compute", kind).label for kind in get_args(WorkKind))
    assert all(operation_of("transfer", payload).label for payload in get_args(Payload))
    assert operation_of("wait", "KV") is operation_of("wait", "stall") is OPERATIONS["waiting"]
    assert operation_of("wait", "collective") is OPERATIONS["collective"]
