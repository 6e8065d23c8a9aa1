"""TTFT from a file of `kvrsim predictor build`, without any package:

python read_predictor.py PREDICTOR TOKENS [CACHED_PREFIX [BATCH]]
"""

import json
import sys
from bisect import bisect_right


def around(knots: list[int], value: int) -> list[tuple[int, float]]:
    """The knots beside a value, and their weights."""
    low = min(max(0, bisect_right(knots, value) - 1), max(0, len(knots) - 2))
    if knots[low] == value or len(knots) == 1:
        return [(low, 1.0)]
    weight = (value - knots[low]) / (knots[low + 1] - knots[low])
    return [(low, 1 - weight), (low + 1, weight)]


def predict(grid: dict, ctx: int, cached_prefix: int = 0, batch: int = 1) -> dict:
    """Seconds to the first token with their 80 % interval, and the strategy; ValueError outside the grid."""
    lengths, prefixes, batches = grid["new_tokens"], grid["cached_prefix"], grid["batch"]
    new = ctx - cached_prefix
    for name, value, least, most in (
        ("context", ctx, lengths[0], grid["longest_context"]),
        ("batch", batch, batches[0], batches[-1]),
        ("cached prefix", cached_prefix, prefixes[0], prefixes[-1]),
        ("new tokens", new, lengths[0], lengths[-1]),
    ):
        if not least <= value <= most:
            raise ValueError(f"{name} {value}: the predictor has {least} to {most}")
    columns = around(prefixes, cached_prefix)
    cells = [(b, p, wb * wp) for b, wb in around(batches, batch) for p, wp in columns]
    places = around(lengths, new)
    first, share = places[0]
    last, rest = places[-1]
    if last == first:
        rest = 0.0

    def mean(seconds: list) -> float:
        total = 0.0
        for b, p, weight in cells:
            row = seconds[b][p]
            total += weight * (share * row[first] + rest * row[last])
        return total

    best, least_s = None, float("inf")
    for one in grid["strategies"]:
        room = one["most_new_tokens"]  # new tokens that fit in memory
        if new * batch <= sum([weight * batches[b] * room[b][p] for b, p, weight in cells]):
            seconds = mean(one["ttft_s"])
            if seconds < least_s:
                best, least_s = one, seconds
    if best is None:
        raise ValueError(f"{new} new tokens do not fit in the GPUs' memory")
    ends = {"ttft_low_s": mean(best["ttft_low_s"]), "ttft_high_s": mean(best["ttft_high_s"])}
    return {"ttft_s": least_s, **ends, "strategy": best["strategy"]}


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(predict(json.load(file), *map(int, sys.argv[2:]))))
