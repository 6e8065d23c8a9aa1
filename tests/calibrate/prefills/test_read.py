"""Rows of measured prefills: CSV files, what files leave to the options, and mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibrate.prefills.rows import PrefillDefaults, read_prefills
from kvrsim.errors import InputError

FULL = """\
# measured on a Sunday
model,gpu,num_gpus,strategy,context_len,batch,cached_prefix,dtype,ttft_s
llama-2-7b,A100-SXM-80GB,1,single,2k,1,0,fp16,0.131
llama-2-70b,a100-80gb,8,tp8+kvr-e,16384,2,1024,bf16,3.5
"""


def written(folder: Path, text: str, name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_every_column_is_read(tmp_path: Path) -> None:
    found = read_prefills([written(tmp_path, FULL)], PrefillDefaults())
    first, second = found.rows
    assert (first.model, first.gpu, first.num_gpus, first.strategy) == ("llama-2-7b", "A100-SXM-80GB", 1, "single")
    assert (first.context_len, first.batch, first.cached_prefix, first.dtype) == (2048, 1, 0, "fp16")
    assert first.ttft_s == 0.131
    assert second.case == "llama-2-70b 16384 tp8+kvr-e on 8 GPUs, batch 2, 1024 cached"
    assert found.notes == ()


def test_absent_columns_and_empty_cells_take_the_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "context_len,num_gpus,ttft_s\n1024,,0.1\n,4,0.2\n")
    defaults = PrefillDefaults(model="llama-2-7b", num_gpus=2, context_len=512, batch=3, dtype="bf16")
    one, other = read_prefills([path], defaults).rows
    assert (one.model, one.num_gpus, one.context_len, one.batch) == ("llama-2-7b", 2, 1024, 3)
    assert (other.num_gpus, other.context_len, other.dtype, other.cached_prefix) == (4, 512, "bf16", 0)


@pytest.mark.parametrize(("gpus", "strategy"), [(1, "single"), (4, "tp")])
def test_without_a_strategy_engines_split_matrices(tmp_path: Path, gpus: int, strategy: str) -> None:
    path = written(tmp_path, f"model,context_len,num_gpus,ttft_s\nllama-2-7b,1024,{gpus},0.1\n")
    assert read_prefills([path], PrefillDefaults()).rows[0].strategy_name == strategy


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "ttft_s,model,context_len,engine,notes\n0.1,llama-2-7b,1k,vLLM,warm\n")
    assert read_prefills([path], PrefillDefaults()).notes == ("rows.csv: columns that are not read: engine, notes",)


def test_files_are_joined_in_their_order(tmp_path: Path) -> None:
    head = "model,context_len,ttft_s\n"
    one = written(tmp_path, head + "llama-2-7b,1k,0.1\n", "one.csv")
    other = written(tmp_path, head + "llama-2-7b,2k,0.2\n", "other.csv")
    assert [row.ttft_s for row in read_prefills([other, one], PrefillDefaults()).rows] == [0.2, 0.1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,context_len\nllama-2-7b,1k\n", "header: got 'model, context_len', accepted: a column ttft_s"),
        ("ttft_s\n", "accepted: files with one measured prefill or more"),
        ("ttft_s,context_len,model\n0,1k,llama-2-7b\n", "line 2: ttft_s: got '0', accepted: a finite number above 0"),
        ("ttft_s,context_len,model\nnan,1k,llama-2-7b\n", "line 2: ttft_s: got 'nan'"),
        ("ttft_s,context_len,model\n0.1,long,llama-2-7b\n", "line 2: context_len: got 'long'"),
        ("ttft_s,context_len,model,num_gpus\n0.1,1k,llama-2-7b,0\n", "line 2: num_gpus: got '0'"),
        ("ttft_s,context_len,model,dtype\n0.1,1k,llama-2-7b,int3\n", "line 2: dtype: got 'int3', accepted: fp16"),
        ("ttft_s,context_len,model,strategy\n0.1,1k,llama-2-7b,best\n", "line 2: strategy: got 'best'"),
        ("ttft_s,context_len\n0.1,1k\n", "line 2: model: got 'nothing', accepted: a value, or one for all rows"),
        ("ttft_s,model\n0.1,llama-2-7b\n", "line 2: context_len: got 'nothing'"),
    ],
)
def test_mistakes_name_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_prefills([written(tmp_path, text)], PrefillDefaults())
    assert message in str(caught.value)


def test_a_table_of_measurements_runs_no_code(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("raise SystemExit('run')\n", encoding="utf-8")
    path = written(tmp_path, f"ttft_s,context_len,model,strategy\n0.1,1k,llama-2-7b,{code}:MINE\n")
    with pytest.raises(InputError, match="line 2: strategy"):
        read_prefills([path], PrefillDefaults())


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_prefills([tmp_path / "none.csv"], PrefillDefaults())
