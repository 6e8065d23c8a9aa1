"""Reference rows are complete, use kvrsim's names, and are left out only by the rules in their file."""

from __future__ import annotations

from kvrsim.published import read_table
from validate.published.compare import DATA

ROWS = read_table(DATA / "serving_prefills.csv")
ENGINES = {
    "vllm-2023": 52,
    "loongserve-2024": 14,
    "tensorrt-llm-0.5": 8,
    "ring-flash-attention": 8,
    "lmdeploy-0.1": 7,
    "mooncake-vllm-0.11": 4,
}


def test_every_serving_row_is_there_with_its_source() -> None:
    assert {name: sum(row["engine_name"] == name for row in ROWS) for name in ENGINES} == ENGINES
    assert len(ROWS) == sum(ENGINES.values())
    assert all(row["source"].startswith("github:") and float(row["seconds"]) > 0 for row in ROWS)
    assert {row["cluster"] for row in ROWS} == {f"{gpu}-nvlink" for gpu in ("a100", "h100", "a800", "h800")}
    assert len({tuple(row.values()) for row in ROWS}) == len(ROWS)


def test_rows_are_left_out_by_the_rules_alone() -> None:
    """Rules depend on the engine, GPUs and tokens, never on an error."""
    for row in ROWS:
        gpus, tokens = int(row["num_gpus"]), int(row["context_len"]) * int(row["batch"])
        vllm = row["engine_name"] == "vllm-2023"
        rule = ""
        if vllm and gpus in (4, 8) and tokens > 2048:
            rule = "tp_over_2048_tokens"
        elif vllm and (gpus, tokens) == (2, 64 * 512):
            rule = "did_not_run"
        elif vllm and row["cluster"] == "a100-nvlink" and int(row["batch"]) > 1:
            rule = "batch_over_prompt"
        assert row["left_out"] == rule
