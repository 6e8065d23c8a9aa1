"""A partition from a table of `kvrsim table build`, without any package: python read_table.py TABLE GPUS TOKENS."""

import json
import sys


def partition(table: dict, num_gpus: int, context_len: int) -> list[int]:
    """Chunk lengths of the ranks, interpolated between the two nearest entries: see docs/how-to/partition-table.md."""
    entries = [entry for entry in table["entries"] if entry["num_gpus"] == num_gpus]
    low = max((e for e in entries if e["context_len"] <= context_len), key=lambda e: e["context_len"])
    high = min((e for e in entries if e["context_len"] >= context_len), key=lambda e: e["context_len"])
    if low is high:
        return low["partition"]
    weight = (context_len - low["context_len"]) / (high["context_len"] - low["context_len"])
    keys = ("fractions", "levels", "token_s")
    mixed = {key: [a + weight * (b - a) for a, b in zip(low[key], high[key], strict=True)] for key in keys}
    tokens = context_len - table["setting"]["cached_prefix"]
    prefixes = [context_len - tokens + sum(mixed["fractions"][:rank]) * tokens for rank in range(num_gpus)]
    jumps = list(zip(*table["steps"].values(), strict=True))  # chunk length, seconds, seconds a token of prefix

    def longest(rank: int, shift_s: float) -> int:
        token_s, passed_s = mixed["token_s"][rank], 0.0
        level = mixed["levels"][rank] * tokens + shift_s / token_s
        for chunk, jump_s, prefix_s in jumps:
            if chunk + 1 + (jump_s + prefix_s * prefixes[rank]) / token_s > level:
                return max(1, min(chunk, int(level - passed_s / token_s)))
            passed_s = jump_s + prefix_s * prefixes[rank]
        return max(1, int(level - passed_s / token_s))

    early, late = -1e6, 1e6  # seconds by which all ranks may be done sooner or later
    for _ in range(90):
        enough = sum(longest(rank, (early + late) / 2) for rank in range(num_gpus)) >= tokens
        early, late = (early, (early + late) / 2) if enough else ((early + late) / 2, late)
    chunks = [longest(rank, late) for rank in range(num_gpus)]
    for rank in range(num_gpus):  # several ranks may come to a jump at once
        chunks[rank] -= max(0, min(sum(chunks) - tokens, chunks[rank] - longest(rank, early)))
    shares = [share * tokens for share in mixed["fractions"]]
    if all(abs(chunk - share) <= max(1, 0.15 * share) for chunk, share in zip(chunks, shares, strict=True)):
        return chunks
    ends = [0]  # chunks far from the shares are not used
    for rank in range(1, num_gpus):
        ends.append(min(max(round(sum(shares[:rank])), ends[-1] + 1), tokens - num_gpus + rank))
    return [end - start for start, end in zip(ends, [*ends[1:], tokens], strict=True)]


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(partition(json.load(file), int(sys.argv[2]), int(sys.argv[3])))
