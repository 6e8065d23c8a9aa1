"""Names from users: no control character reaches a terminal, no formula reaches a picture, no HTML reaches a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.cli import main as cli
from kvrsim.text import in_markdown, printable

EVIL = "x\x1b]0;PWNED\x07\x1b[31m\x9b31m\x9d0;t\x9c\u202ey"  # OSC, BEL, CSI, their C1 forms, right-to-left
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@given(text=st.text())
def test_no_control_character_is_left_and_the_rest_stays(text: str) -> None:
    safe = printable(text)
    assert not CONTROL.search(safe)
    assert printable(safe) == safe
    assert CONTROL.search(text) or safe == text


@given(text=st.text(alphabet=st.sampled_from("ab <>&\\`*[]|\n#\x1b")))
def test_markdown_holds_words_only(text: str) -> None:
    safe = in_markdown(text)
    assert not re.search(r"[<>\n]", safe)
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*\[\]|]", safe)


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert cli.main(["clusters", "show", "a100-nvlink", "--json"]) == 0
    path = tmp_path / "c.json"
    path.write_text(json.dumps(json.loads(capsys.readouterr().out) | {"name": EVIL}))
    return path


@pytest.mark.parametrize(
    "command", [["plan", "--ctx", "1k", "--gpus", "2"], ["clusters", "show", EVIL], ["plan", "--ctx", EVIL]]
)
def test_names_do_not_command_the_terminal(
    command: list[str], cluster: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cli.main([*command, *(["--cluster", str(cluster)] if "--gpus" in command else [])])
    out, err = capsys.readouterr()
    assert not CONTROL.search(out + err)
    assert "PWNED" in out + err
    assert r"\x1b" in out + err


def test_a_dollar_in_a_name_is_no_formula(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(r"$\frac{$")
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    config |= {"max_position_embeddings": 4096, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    options = ["--model", str(folder), "--gpus", "2"]
    assert cli.main(["map", "--ctx", "1k:2k:1k", *options, "--plot", "m.png"]) == 0
    assert cli.main(["plan", "--ctx", "1k", *options, "--plot", "p.svg"]) == 0
    assert "error" not in capsys.readouterr().err


def failing(*_: object, **__: object) -> None:
    raise ValueError("max() arg is an empty sequence")


@pytest.mark.parametrize(
    ("command", "drawing"),
    [
        (["plan", "--ctx", "1k", "--gpus", "2"], "kvrsim.views.plan.draw_gantt"),
        (["map", "--ctx", "1k", "--gpus", "2"], "kvrsim.views.map.figure"),
    ],
)
def test_a_picture_that_fails_costs_the_picture_only(
    command: list[str],
    drawing: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cli.main([*command, "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(drawing, failing)
    path = tmp_path / "p.png"
    assert cli.main([*command, "--json", "--plot", str(path)]) == 74
    out, err = capsys.readouterr()
    assert json.loads(out).keys() == wanted.keys()
    assert err.count("\n") == 1
    assert f"{path}: not written, the answer is complete: ValueError" in err
    assert not path.exists()
