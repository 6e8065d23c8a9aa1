"""The origin of a page of results: a page is out of date if its command or a prediction has changed, and only then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvrsim.errors import InputError
from validate import results
from validate.report import write_page
from validate.results import FROZEN, PAGES, PREDICTIONS, ROOT, ResultsPage, body, origin_of

PAGE = ResultsPage(path="docs/results/one.md", command="python -m one", rests_on=("here",))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResultsPage:
    """A page that contains a prediction of 2 s, in a separate repository."""
    (tmp_path / PAGE.path).parent.mkdir(parents=True)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "PAGES", (PAGE,))
    monkeypatch.setattr(results, "_commit", lambda: "abc")
    monkeypatch.setattr(results, "prediction", lambda name: 2.0)
    write_page(PAGE.file, ["# One", "", "Text."])
    return PAGE


def test_a_page_states_its_origin_and_is_fresh(page: ResultsPage) -> None:
    text = page.file.read_text()
    assert body(text) == "# One\n\nText.\n"
    origin = origin_of(text)
    assert origin is not None
    assert (origin.command, origin.commit, origin.predictions) == ("python -m one", "abc", {"here": 2.0})
    assert list(results.stale()) == []


@pytest.mark.parametrize(("now", "is_stale"), [(2.0005, False), (2.01, True), ("2.0", True)])
def test_a_page_is_stale_where_a_prediction_has_changed(
    page: ResultsPage, monkeypatch: pytest.MonkeyPatch, now: float | str, is_stale: bool
) -> None:
    monkeypatch.setattr(results, "prediction", lambda name: now)
    assert bool(list(results.stale())) is is_stale


@pytest.mark.parametrize(
    ("commit", "machine", "is_kept"), [("abc", "one", True), ("b", "one", False), ("abc", "two", False)]
)
def test_a_page_is_kept_at_its_commit_and_machine(
    page: ResultsPage, monkeypatch: pytest.MonkeyPatch, commit: str, machine: str, is_kept: bool
) -> None:
    monkeypatch.setattr(results, "machine", lambda: "one")
    write_page(page.file, ["# One"])
    monkeypatch.setattr(results, "machine", lambda: machine)
    monkeypatch.setattr(results, "_commit", lambda: commit)
    assert page.is_written() is is_kept
    assert not replace(page, command="python -m two").is_written()


def test_pages_of_a_changed_checkout_are_not_kept(page: ResultsPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_commit", lambda: "abc+")
    write_page(page.file, ["# One"])
    assert not page.is_written()


def test_an_interruption_ends_the_command_and_names_the_page(
    page: ResultsPage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second command fails, the third interrupts this process."""
    stop = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    codes = {"first": "print(1)", "second": "raise ValueError(2)", "third": stop, "fourth": "print(4)"}
    pages = tuple(replace(page, path=f"{name}.md", command=f'python -c "{code}"') for name, code in codes.items())
    monkeypatch.setattr(results, "PAGES", pages)
    assert results.main([]) == 130
    output, errors = capfd.readouterr()
    assert output == "1\n"
    assert errors.count("Traceback") == 1, "only of the command that failed"
    assert errors.splitlines()[-1] == "interrupted: 1 pages are written; the same command resumes with third"


def test_inputs_and_programs_make_a_page_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = replace(PAGE, command="python one.py --traces TRACES", needs="traces")
    assert (traces.lacks({}), traces.lacks({"TRACES": "here"}), PAGE.lacks({})) == ("traces", None, None)
    monkeypatch.setattr(results.shutil, "which", lambda name: None)
    assert replace(PAGE, program="chromium").lacks({}) == "chromium"


def test_a_page_that_needs_only_the_checkout_cannot_be_frozen(
    page: ResultsPage, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        results.main(["--freeze", "one"])
    assert "got one" in capsys.readouterr().err


def test_a_frozen_page_says_so_and_is_not_stale(page: ResultsPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "prediction", lambda name: 3.0)
    before = body(page.file.read_text())
    page.freeze()
    text = page.file.read_text()
    assert list(results.stale()) == []
    assert "Frozen" in text.split("\n")[2]
    assert body(text) == before
    write_page(page.file, ["# One"])
    assert "Frozen" not in page.file.read_text()


def test_other_commands_missing_unknown_and_unmarked_pages_are_reported(
    page: ResultsPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "PAGES", (replace(page, command="python -m two"),))
    assert len(list(results.stale())) == 1
    monkeypatch.setattr(results, "PAGES", ())
    assert len(list(results.stale())) == 1
    monkeypatch.setattr(results, "PAGES", (page,))
    page.file.write_text("# One\n")
    assert len(list(results.stale())) == 1
    page.file.unlink()
    assert len(list(results.stale())) == 1


def test_pages_elsewhere_have_no_origin(tmp_path: Path) -> None:
    write_page(tmp_path / "mine.md", ["# Mine"])
    assert (tmp_path / "mine.md").read_text() == "# Mine\n"
    with pytest.raises(InputError):
        write_page(tmp_path / "missing" / "mine.md", ["# Mine"])


def test_every_page_rests_on_predictions_that_exist() -> None:
    assert {name for page in PAGES for name in page.rests_on} == set(PREDICTIONS)
    assert len({page.name for page in PAGES}) == len(PAGES)
    assert all((ROOT / path).exists() for path in FROZEN)
