"""TTFT from a file of `kvrsim predictor build`, without any package:

python read_predictor.py PREDICTOR TOKENS [CACHED_PREFIX [BATCH]]
"""

import json
import sys
from bisect import bisect_right
from itertools import product


def around(knots: list[int], value: int) -> list[tuple[int, float]]:
    """The knots beside a value, and their weights."""
    low = min(max(0, bisect_right(knots, value) - 1), max(0, len(knots) - 2))
    if knots[low] == value or len(knots) == 1:
        return [(low, 1.0)]
    weight = (value - knots[low]) / (knots[low + 1] - knots[low])
    return [(low, 1 - weight), (low + 1, weight)]


def predict(grid: dict, ctx: int, cached_prefix: int = 0, batch: int = 1) -> dict:
    """Seconds to the first token with their 80 % interval, and the strategy; ValueError outside the grid."""
    new = ctx - cached_prefix
    for name, value, knots in (
        ("context", ctx, [grid["new_tokens"][0], grid["longest_context"]]),
        ("batch", batch, grid["batch"]),
        ("cached prefix", cached_prefix, grid["cached_prefix"]),
        ("new tokens", new, grid["new_tokens"]),
    ):
        if not knots[0] <= value <= knots[-1]:
            raise ValueError(f"{name} {value}: the predictor has {knots[0]} to {knots[-1]}")
    rows, columns = around(grid["batch"], batch), around(grid["cached_prefix"], cached_prefix)
    cells = [(b, p, wb * wp) for (b, wb), (p, wp) in product(rows, columns)]
    lengths = around(grid["new_tokens"], new)

    def mean(seconds: list) -> float:
        return sum(weight * wn * seconds[b][p][n] for b, p, weight in cells for n, wn in lengths)

    def most(one: dict) -> float:  # new tokens that fit in memory
        return sum(weight * grid["batch"][b] * one["most_new_tokens"][b][p] for b, p, weight in cells) / batch

    fitting = [one for one in grid["strategies"] if new <= most(one)]
    if not fitting:
        raise ValueError(f"{new} new tokens do not fit in the GPUs' memory")
    best = min(fitting, key=lambda one: mean(one["ttft_s"]))
    found = {name: mean(best[name]) for name in ("ttft_s", "ttft_low_s", "ttft_high_s")}
    return found | {"strategy": best["strategy"]}


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(predict(json.load(file), *map(int, sys.argv[2:]))))
