"""Measurements: a written file reads back unchanged, and an error names file, line and column."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.data import (
    COLUMNS,
    MEASURED_DTYPES,
    NEEDED,
    OPERATIONS,
    Measurement,
    read_measurements,
    read_origin,
    read_origins,
    write_measurements,
)
from kvrsim.choices import DTYPES
from kvrsim.errors import InputError

ATTENTION: dict[str, Any] = {
    **{"operation": "attention", "kernel": "flash", "device": "a GPU", "dtype": "bf16", "chunk": 512, "prefix": 0},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "median_s": 0.001, "source": "a test"},
}

positive = st.integers(1, 2**50)
texts = (
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cf", "Zl", "Zp", "Cn", "Co"]))
    .map(lambda text: " ".join(text.split()))
    .filter(lambda text: text != "" and text.isprintable())
)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    """A random measurement: the fields that its operation needs, and some others."""
    fields: dict[str, Any] = {name: draw(st.none() | positive) for name in ("tokens", "bytes", "ranks", "prefix")}
    operation = draw(st.sampled_from(OPERATIONS))
    dtypes = MEASURED_DTYPES if operation == "gemm" else DTYPES
    fields |= {"operation": operation, "dtype": draw(st.sampled_from(dtypes))}
    kv_heads = draw(st.integers(1, 64))
    values = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 16)),
        "prefix": draw(st.integers(0, 2**50)),
        "nodes": draw(st.integers(1, 2)),
        "dtype": fields["dtype"],
    }
    fields |= {name: values[name] if name in values else draw(positive) for name in NEEDED[fields["operation"]]}
    return Measurement(
        **fields,
        kernel=draw(texts),
        device=draw(texts),
        source=draw(texts),
        batch=draw(positive),
        src=draw(st.none() | st.integers(0, 2**50)),
        dst=draw(st.none() | st.integers(0, 2**50)),
        messages=draw(positive),
        warmups=draw(st.none() | st.integers(0, 2**50)),
        repeats=draw(st.none() | positive),
        median_s=draw(st.floats(0, 1e9, exclude_min=True)),
        mean_s=draw(st.none() | st.floats(1e-9, 1e9)),
        spread_s=draw(st.none() | st.floats(0, 1e9)),
    )


@given(rows=st.lists(measurements(), max_size=5))
def test_what_is_written_reads_back(rows: list[Measurement], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("measurements") / "rows.csv"
    write_measurements(path, rows)
    assert read_measurements(path) == rows


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(origin=st.dictionaries(st.text(), json_values, max_size=4))
def test_an_origin_comes_back(origin: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("measurements") / "rows.csv"
    rows = [Measurement(**ATTENTION)]
    write_measurements(path, rows, origin=origin)
    assert read_origin(path) == origin
    assert read_measurements(path) == rows


def test_tables_of_packages_have_no_origin_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_measurements(path, [Measurement(**ATTENTION)], origin={"threads": 1})
    sources = ["aisimulate:h100_sxm/sglang", f"{path}?gpu=a", "aiconfigurator:h100_sxm"]
    assert read_origins(sources, "--from") == [{"threads": 1}]


@pytest.mark.parametrize(
    ("text", "accepted"), [("{", "valid JSON"), ("", "valid JSON"), ("[1]", "a JSON object"), ("[" * 10**5, "JSON")]
)
def test_a_broken_origin_is_named_by_file_and_line(tmp_path: Path, text: str, accepted: str) -> None:
    path = write(tmp_path / "m.csv", ATTENTION, before=f"# by hand\n# origin {text}\n")
    with pytest.raises(InputError) as caught:
        read_origin(path, "--compute")
    message = str(caught.value)
    assert message.startswith(f"--compute {path}, line 2: origin: got ")
    assert accepted in message
    assert len(message) < 400
    assert read_measurements(path)


def write(path: Path, *rows: dict[str, Any], before: str = "") -> Path:
    """Write a CSV file with the columns of the first row."""
    with path.open("w", newline="") as file:
        file.write(before)
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_measurements(path, "--from")
    return str(caught.value)


def test_columns_may_be_missing_comments_stand_anywhere_and_numbers_are_as_pandas_writes_them(tmp_path: Path) -> None:
    path = write(tmp_path / "m.csv", ATTENTION | {"chunk": "512.0"}, before="\ufeff# by hand\n\n")
    path.write_text(path.read_text() + "# the end\n")
    (row,) = read_measurements(path)
    assert row == Measurement(**ATTENTION)
    assert (row.batch, row.spread_s, row.tokens, row.messages, row.src) == (1, None, None, 1, None)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_says_what_it_needs(operation: str) -> None:
    fields = {"operation": operation, "kernel": "k", "device": "d", "median_s": 1.0, "source": "s"}
    values: dict[str, Any] = dict.fromkeys(COLUMNS, 1) | {"dtype": "fp16"}
    needed = {name: values[name] for name in NEEDED[operation]}
    Measurement(**fields, **needed)
    for name in needed:
        with pytest.raises(InputError, match=rf"^{name} is missing, accepted: a value \({operation} needs"):
            Measurement(**fields, **{other: value for other, value in needed.items() if other != name})


@pytest.mark.parametrize(
    ("column", "value", "accepted"),
    [
        ("operation", "ttft", "gemm, attention"),
        ("source", "\x1b[2J", "one line"),
        ("dtype", "int8", "fp16, bf16, fp8, fp32"),
        ("chunk", "", "a value (attention needs"),
        ("num_key_value_heads", "5", "a divisor of num_attention_heads (32)"),
        ("src", "-1", "a whole number from 0"),
        ("median_s", "nan", "above 0"),
        ("median_s", "1e12", "at most 1e+09"),
    ],
)
def test_a_bad_value_is_named_by_file_line_and_column(tmp_path: Path, column: str, value: str, accepted: str) -> None:
    full = ATTENTION | {"nodes": "", "mean_s": "", "spread_s": "", "src": "", "dst": "", "messages": "", "repeats": ""}
    path = write(tmp_path / "m.csv", full, full | {column: value}, before="# a comment\n")
    message = refusal(path)
    problem = ": got '" if value else " is missing"
    assert message.startswith(f"--from {path}, line 4: {column}{problem}"), message
    assert accepted in message.partition("accepted: ")[2]
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "an empty file"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"operation,median\ngemm,1\n", "column: got 'median'"),
        (b"operation,operation\n", "each column once"),
        (b"operation,kernel,device,median_s,source\nhost_layer,k,d\n", "line 2: got '3 values', accepted: 5 values"),
        (b'operation,kernel,device,median_s,source\nhost_layer,"k,d\n', "comma-separated values"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_what_is_not_such_a_file_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith("--from")
    assert str(path) in message
    assert complaint in message


@given(content=st.binary(max_size=200) | st.text(alphabet="operatin,\n\"'#1.\r").map(str.encode))
def test_no_file_breaks_the_reader(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "m.csv"
    path.write_bytes(content)
    with pytest.raises(InputError):
        read_measurements(path)
