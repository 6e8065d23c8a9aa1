"""The notebooks run from top to bottom and print the expected texts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_CELL_S = 1500  # much longer than any cell needs on a busy machine; stops a cell that hangs
# Smaller questions than a notebook has: the same cells run in less time.
SMALLER = {
    "01-from-a-trace-to-a-fleet": {
        "count = 3000": "count = 300",
        '"slo_ttft": "1s"': '"slo_ttft": "1s", "group_sizes": "1,2"',
    },
    "03-a-slower-network": {
        'requests=2000,context=lognormal:3k:0.7,max=12k"': 'requests=200,context=3k"',
        "replications=2)": 'replications=2, group_sizes="1,2")',
        '["1k", "2k", "4k", "8k"]': '["1k", "8k"]',
    },
    "04-my-engine-my-plan": {
        "        (2, 8192, 1.3398),\n        (8, 128, 0.0582),\n": "",
        'strategy="tp", ctx="8k"': 'strategy="tp", ctx="4k"',
    },
}
SAYS = {
    "01-from-a-trace-to-a-fleet": "asked again:",
    "02-the-papers-story": "no partition of KV-Runahead is below",
    "03-a-slower-network": "10 x slower:",
    "04-my-engine-my-plan": "% before,",
}


def test_every_notebook_is_tested() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(SAYS)


@pytest.mark.filterwarnings("default")  # warnings of the kernel's own libraries
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    for written, smaller in SMALLER.get(path.stem, {}).items():
        assert any(written in cell.source for cell in notebook.cells), written
        for cell in notebook.cells:
            cell.source = cell.source.replace(written, smaller)
    client = nbclient.NotebookClient(
        notebook, timeout=MOST_CELL_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()  # raises the error of a cell, or an error after the time limit
    text = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    assert SAYS[path.stem] in text
    shown = [output.get("data", {}) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in data for data in shown)
    assert any("<div><p><strong>" in data.get("text/html", "") for data in shown) or path.stem.startswith("03")
