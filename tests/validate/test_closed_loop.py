"""The check of the wait model against runs of benchmarks."""

from pathlib import Path

import pytest

from kvrsim.closed_loop import ClosedLoop
from kvrsim.errors import InputError
from validate.closed_loop import checks, page, read_runs

HEADER = "id,backend,system,mode,isl,osl,concurrency,silicon_ttft_ms,silicon_tpot_ms"


def runs(tmp_path: Path, factor: float) -> Path:
    """Runs of one setting by the formula, those of more users `factor` times as long."""
    lines = [HEADER]
    for users in (4, 8, 16, 32):
        loop = ClosedLoop(users=users, tpot_s=0.01, output_tokens=900, prompt_tokens=0.9 * 8192)
        mean_ms = 1e3 * loop.mean_ttft_s(0.2) * (factor if users > 4 else 1)
        lines.append(f"run{users},vllm,h100_sxm,agg,8192,1000,{users}.0,{mean_ms},10")
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_runs_of_more_users_are_predicted_from_those_of_four(tmp_path: Path, factor: float) -> None:
    found = checks(read_runs(runs(tmp_path, factor)))
    assert [one.run.loop.users for one in found] == [8, 16, 32]
    assert [one.rel_error for one in found] == pytest.approx([1 / factor - 1] * 3)
    assert f"{1 / factor:.3f}" in "\n".join(page(found, 4))


def test_a_file_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,isl\na,1024\n")
    with pytest.raises(InputError, match="concurrency"):
        read_runs(path)
