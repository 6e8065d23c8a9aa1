"""The catalogue of model types: polynomials in the keys of a configuration, and the files that they make."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from calibrate.catalogue import Kind, Symbol, required_values
from kvrsim.model.template import evaluate, model_type_data

NUMBERS = st.integers(1, 1000)


@given(heads=NUMBERS, width=NUMBERS, hidden=NUMBERS)
def test_expressions_have_the_values_of_their_symbols(heads: int, width: int, hidden: int) -> None:
    a, b, c = Symbol(heads, "heads"), Symbol(width, "width"), Symbol(hidden, "hidden")
    numbers = {"heads": heads, "width": width, "hidden": hidden}
    for value in (a * b + c, 3 * a * a - b, c // a, (a * b + 2 * c) // b, -a + 7, (4 * a) // 2):
        assert evaluate(value.expression, numbers) == int(value)
    assert a - a == 0
    assert (a * b) // (a * b) == 1


def test_a_shipped_type_is_what_its_class_gives() -> None:
    kind = Kind("gptj")
    assert kind.add(required_values("gptj")) == "free: 5; fixed: "
    assert kind.add({"n_layer": 3, "n_embd": 512, "n_head": 4}) == "covered"
    assert json.loads(json.dumps(kind.data)) == model_type_data("gptj")
