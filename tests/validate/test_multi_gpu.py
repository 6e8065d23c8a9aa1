"""Published prefills on several GPUs: complete rows with their sources, ratios of rows, and a page without gaps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kvrsim.hardware import load_cluster
from kvrsim.strategies import get_strategy
from validate.multi_gpu import MultiGpuRow, RigRatio, RowErrors, ratios_of, read_rows, rig_table

ROWS = read_rows()


def test_every_row_is_there_with_its_source() -> None:
    assert Counter(row.rig for row in ROWS) == {
        "BurstAttention": 30,
        "APB": 23,
        "Meta": 17,
        "RTX PRO 6000": 11,
        "RTX 3090": 9,
    }
    for row in ROWS:
        assert row.fields["source"].startswith(("arXiv:", "github:"))
        assert row.measured_s > 0
        assert 0 < row.new_tokens <= row.tokens
        assert load_cluster(row.asked["cluster"]).gpu.name
        assert get_strategy(row.fields["strategy"])
    assert len({tuple(row.fields.values()) for row in ROWS}) == len(ROWS)


def test_rows_are_left_out_by_the_rules_alone() -> None:
    """Rules depend on the machine and the kernels, never on an error."""
    for row in ROWS:
        notes = row.fields["notes"]
        rule = ""
        if row.rig == "BurstAttention":
            has_flash = notes in ("BurstAttention", "Megatron, all-reduce", "Megatron, all-gather and reduce-scatter")
            rule = "unknown_link" if has_flash else "no_flash"
        elif notes.startswith("int8"):
            rule = "int8"
        assert row.fields["left_out"] == rule


def test_steps_of_an_engine_add_up_to_the_prompt() -> None:
    for row in ROWS:
        if row.is_compared and row.prefill.pieces is not None:
            assert sum(row.prefill.pieces) == row.new_tokens
            assert max(row.prefill.pieces) == int(row.fields["step_tokens"])


def _row(seconds: float, predicted_s: float, **fields: str) -> MultiGpuRow:
    """A row of APB with these seconds."""
    base = next(row for row in ROWS if row.is_compared)
    row = MultiGpuRow(fields={**base.fields, "seconds": str(seconds), **fields})
    check = replace(
        base.check, measured_s=seconds, predicted_s=predicted_s, low_s=predicted_s / 2, high_s=2 * predicted_s
    )
    vars(row)["check"] = check
    return row


def test_a_common_error_cancels_in_a_ratio() -> None:
    first = _row(2.0, 3.0, pair="x")
    second = _row(1.0, 1.5, pair="x", strategy="ulysses")
    (ratio,) = ratios_of([first, _row(9.0, 1.0, pair="y"), second])
    assert (ratio.kind, ratio.measured, ratio.predicted, ratio.rel_error) == ("strategy", 0.5, 0.5, 0.0)
    assert RigRatio(first=first, second=_row(1.0, 1.0, context_len="9")).kind == "length"
    assert RigRatio(first=first, second=_row(1.0, 1.0)).kind == "link"


def test_errors_have_sign_size_and_coverage() -> None:
    errors = RowErrors.of([_row(1.0, 0.9), _row(1.0, 1.3), _row(1.0, 3.0)])
    assert (errors.number, errors.median, errors.size) == (3, "+30.0%", "30.0%")
    assert (errors.low, errors.high, errors.inside, errors.width) == ("-10%", "+200%", "67%", "4.00")


def test_the_split_context_of_long_prompts_is_predicted_within_a_few_percent() -> None:
    """APB at 128k: one GPU and eight; the two errors are alike."""
    rows = [row for row in ROWS if row.fields["pair"] == "apb-131072"]
    (ratio,) = ratios_of(rows)
    assert max(abs(row.check.rel_error) for row in rows) < 0.07
    assert abs(ratio.rel_error) < 0.08
    assert rig_table(rows)[-2].startswith("| all |  |  | 128k | 2 |")


def test_metas_gpus_are_predicted_better_with_their_power_limit_and_memory() -> None:
    (row,) = [row for row in ROWS if row.fields["pair"] == "meta-t6-32768" and row.prefill.strategy == "tp8"]
    usual = replace(row.prefill, asked=row.asked | {"cluster": "h100"})
    assert -0.2 < row.check.rel_error < 0
    assert usual.predicted_s / row.measured_s - 1 < 1.5 * row.check.rel_error
