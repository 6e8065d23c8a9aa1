"""Reference rows are complete, named as kvrsim names things, and left out only by the rules that their file states."""

from __future__ import annotations

from validate.published.compare import read_table

ROWS = read_table("serving_prefills.csv")
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
    """Rules look at the engine, GPUs and tokens; never at an error."""
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


def test_batches_that_are_left_out_take_longer_than_one_prompt_with_more_to_compute() -> None:
    """The rule looks at measurements alone; where one prompt of as many tokens was measured, it took less."""
    vllm = [row for row in ROWS if row["engine_name"] == "vllm-2023"]
    longer = []
    for row in (row for row in vllm if row["left_out"] == "batch_over_prompt"):
        tokens = str(int(row["context_len"]) * int(row["batch"]))
        alone = [one for one in vllm if one["batch"] == "1" and one["context_len"] == tokens]
        alike = [one for one in alone if all(one[key] == row[key] for key in ("cluster", "num_gpus"))]
        longer += [float(row["seconds"]) / float(one["seconds"]) for one in alike]
    assert len(longer) == 6
    assert 1.06 < min(longer) < max(longer) < 1.24


def test_what_did_not_run_is_faster_than_half_of_it() -> None:
    for left_out in (row for row in ROWS if row["left_out"] == "did_not_run"):
        alike = ("cluster", "num_gpus", "context_len", "engine_name")
        half = [row for row in ROWS if row["batch"] == "32" and all(row[key] == left_out[key] for key in alike)]
        assert [float(row["seconds"]) > float(left_out["seconds"]) for row in half] == [True]
