"""GemmRows: measured matrix products as arrays, and the tables that a profile keeps of some shapes.

Weight matrices of the built-in models, as serving engines multiply with them: Q, K, V in one, gate and up in one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.fit.solver import Some, column, element_bytes_of, rounded, thinned
from kvrsim.kernels.gemm import GEMM_TYPES, GemmRates, MeasuredShape, Product, Width, merged
from kvrsim.model.gemm import Gemm
from kvrsim.model.load import builtin_models, load_model
from kvrsim.program import Array

Shape = tuple[int, int]  # in_features, out_features

MAX_KNOTS = 40  # of a shape's table
TYPE_KNOTS = 10  # of one in a quantised type
HALF_BYTES = 2
_LEAST_KNOTS = 4
_KNOT_ERROR = 0.003  # relative, below which a table gets no more knots


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GemmRows:
    """As many matrix products as the arrays are long."""

    tokens: Array  # rows of the input
    in_features: Array
    out_features: Array
    seconds: Array  # measured
    element_bytes: Width = HALF_BYTES

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> GemmRows:
        """The gemm measurements."""
        names = ("tokens", "in_features", "out_features", "expected_s")
        tokens, in_features, out_features, seconds = (column(rows, name) for name in names)
        return cls(
            tokens=tokens,
            in_features=in_features,
            out_features=out_features,
            seconds=seconds,
            element_bytes=_width_of(rows),
        )

    def take(self, indices: Some) -> GemmRows:
        """Some of them, by index or mask."""
        return GemmRows(
            tokens=self.tokens[indices],
            in_features=self.in_features[indices],
            out_features=self.out_features[indices],
            seconds=self.seconds[indices],
            element_bytes=self.element_bytes,
        )

    @property
    def shapes(self) -> list[Shape]:
        """One a row."""
        pairs = zip(self.in_features.tolist(), self.out_features.tolist(), strict=True)
        return [(int(fan_in), int(fan_out)) for fan_in, fan_out in pairs]

    def by_shape(self) -> Iterator[tuple[Shape, Some]]:
        """Each shape and the indices of its rows."""
        places: dict[Shape, list[int]] = {}
        for index, shape in enumerate(self.shapes):
            places.setdefault(shape, []).append(index)
        for shape in sorted(places):
            yield shape, np.array(places[shape])

    def form_s(self, rates: GemmRates) -> Array:
        """By the form alone."""
        # The formula takes arrays of shapes as well.
        product = Product(cast(Any, self.in_features), cast(Any, self.out_features))
        return rates.form_s(self.tokens, product, self.element_bytes)

    def predicted_s(self, rates: GemmRates) -> Array:
        """As the simulator takes them."""
        seconds = np.empty(len(self.tokens))
        for shape, indices in self.by_shape():
            seconds[indices] = rates.seconds(self.tokens[indices], (Product(*shape),), self.element_bytes)
        return seconds


def with_tables(form: GemmRates, rows: GemmRows, shapes: Collection[Shape], most: int = MAX_KNOTS) -> GemmRates:
    """The form, and tables of at most so many knots for those of the shapes that were measured often enough."""
    wanted = set(shapes)
    tables = [_table(form, shape, rows.take(indices), most) for shape, indices in rows.by_shape() if shape in wanted]
    return replace(form, measured=tuple(table for table in tables if table is not None))


def _table(form: GemmRates, shape: Shape, rows: GemmRows, most: int) -> MeasuredShape | None:
    """The steps of rows that matter most; None where there are too few."""
    ratios = _ratios(form, rows)
    if len(ratios) < _LEAST_KNOTS:
        return None
    knots, logs = np.array(sorted(ratios)), np.array([ratios[knot] for knot in sorted(ratios)])
    kept = thinned(np.log(knots), logs, most=most, error=_KNOT_ERROR)
    seconds = form.form_s(knots[kept], Product(*shape), rows.element_bytes) * np.exp(logs[kept])
    return MeasuredShape(
        in_features=shape[0],
        out_features=shape[1],
        rows=tuple(int(knot) for knot in knots[kept]),
        seconds=tuple(rounded(float(value)) for value in seconds),
    )


def _width_of(rows: Sequence[Measurement]) -> Width:
    """Of the operands: the rows are all of one quantised type, or all in half precision or in fp32."""
    types = {row.dtype for row in rows}
    width = GEMM_TYPES.get(types.pop() or "") if len(types) == 1 else None
    return element_bytes_of(rows) if width is None else width


def _ratios(form: GemmRates, rows: GemmRows) -> dict[float, float]:
    """By the end of each step: log of measured over form, at that end or else anywhere in the step."""
    ends = np.ceil(rows.tokens / form.step) * form.step
    logs = np.log(rows.seconds / rows.form_s(form))
    found = {}
    for end in sorted(set(ends.tolist())):
        at_end, inside = rows.tokens == end, ends == end
        found[end] = float(np.median(logs[at_end if at_end.any() else inside]))
    return found


def builtin_shapes() -> frozenset[Shape]:
    """(in_features, out_features) of every layer of every model that ships; without the experts of mixtures."""
    return frozenset(shape for name in builtin_models() for shape in model_shapes(name))


def model_shapes(name: str) -> Iterator[Shape]:
    """Those of one model, a built-in name or a path."""
    for layer in load_model(name).layer_kinds:
        dense: tuple[Sequence[Gemm], ...] = () if layer.num_experts else (layer.mlp,)
        mixer = () if layer.mixer is None else (layer.mixer.projections, *((gemm,) for gemm in layer.mixer.output))
        for gemms in (*mixer, *dense):
            for product in merged([Product(gemm.in_features, gemm.out_features) for gemm in gemms]):
                yield product.in_features, product.out_features
