"""A latency model for vllm-vcr, which stands behind vLLM's front end in place of an engine, without any package:

python vllm_vcr_trace.py PREDICTOR --itl-ms 12 > trace.jsonl
vllm-vcr play --latency-trace trace.jsonl

vllm-vcr draws the TTFT of a prompt from the records of a trace with about as many new tokens. The trace has the
predictions of `kvrsim predictor build` for eight lengths in each of its buckets, with and without a cached half.
"""

import argparse
import json
import sys
from collections.abc import Iterator

from read_predictor import predict

EDGES = (0, 65, 129, 257, 513, 1025, 2049, 4097, 8193, 16385, 32769)  # new tokens at which its buckets begin
PER_BUCKET = 8


def records(grid: dict, itl_ms: float, output_tokens: int = 16) -> Iterator[dict]:
    """The lines of a trace: its header, then a record per prompt."""
    question = grid["question"]
    meta = {"model": question["model"], "gpu": question["cluster"]["gpu"], "num_gpus": question["num_gpus"]}
    yield {"meta": {**meta, "source": f"kvrsim {grid['kvrsim_version']}"}}
    for low, high in zip(EDGES, (*EDGES[1:], grid["new_tokens"][-1] + 1), strict=True):
        first, last = max(low, grid["new_tokens"][0]), min(high - 1, grid["new_tokens"][-1])
        step = max(1, (last - first) // (PER_BUCKET - 1))
        for new in range(first, last + 1, step):
            for cached in (0, min(new, grid["cached_prefix"][-1])):
                if new + cached > grid["longest_context"]:
                    continue
                summary = {"mean_ms": itl_ms, "count": output_tokens - 1}
                record = {"prompt_tokens": new + cached, "cached_tokens": cached, "output_tokens": output_tokens}
                ttft_s = predict(grid, new + cached, cached)["ttft_s"]
                yield {**record, "ttft_ms": 1000 * ttft_s, "itl_summary": summary, "concurrency": 1}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a trace for vllm-vcr")
    parser.add_argument("predictor", help="a file of kvrsim predictor build")
    parser.add_argument("--itl-ms", type=float, required=True, help="milliseconds between tokens, which you know")
    arguments = parser.parse_args()
    with open(arguments.predictor) as file:
        for line in records(json.load(file), arguments.itl_ms):
            sys.stdout.write(json.dumps(line) + "\n")
