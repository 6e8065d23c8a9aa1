"""Number of modules that each command loads, so that no command waits for modules that it does not use."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from kvrsim.cli import main as cli

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("kvrsim", "planner", "calibrate", "validate")
# Modules that no command below loads, except those that `import numpy` loads.
UNUSED = {
    *("torch", "transformers", "pandas", "scipy", "matplotlib", "simpy", "joblib", "distributed"),
    *("asyncio", "multiprocessing", "logging", "importlib.metadata", "secrets", "tempfile", "statistics"),
    *("rich", "typer"),
    *("numpy.ma", "numpy.random", "numpy.fft"),
}
SETTING = ("--gpus", "2", "--ctx", "1k")
# For each command: the maximum number of kvrsim's modules, and large modules of other packages.
BUDGETS = [
    (("--version",), 12, ""),
    (("--help",), 13, ""),
    (("plan", "--help"), 24, ""),
    (("engines", "list", "--json"), 27, ""),
    (("predictor", "lookup", "ttft.json", "--ctx", "1k", "--json"), 28, ""),
    (("clusters", "list", "--json"), 31, "numpy"),
    (("profiles", "list", "--json"), 48, "numpy"),
    (("profiles", "list"), 50, "numpy"),
    (("table", "lookup", "table.json", *SETTING, "--json"), 98, "numpy"),
    (("simulate", "--strategy", "kvr-s", *SETTING, "--json"), 166, "numpy"),
    (
        ("plan", *SETTING, "--json"),
        170,
        "numpy numpy.ma numpy.random secrets importlib.metadata tempfile",
    ),  # plan looks for strategies of other packages
]


def loaded_by(code: str, *arguments: str, folder: Path = ROOT) -> set[str]:
    """The modules that are loaded after the code has run in a new process."""
    whole = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", whole, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


@cache
def numpys() -> set[str]:
    return loaded_by("import numpy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small table and a small predictor."""
    path = tmp_path_factory.mktemp("starts")
    table = ("table", "build", *SETTING, "--profile", "roofline", "--jobs", "1", "-o", str(path / "table.json"))
    build = ["predictor", "build", "llama-7b", "a100-nvlink", "--strategy", "tp", "--jobs", "1", "-o"]
    ttft = (*build, str(path / "ttft.json"), *SETTING)
    assert [cli.main([*table]), cli.main([*ttft])] == [0, 0]
    return path


@pytest.mark.parametrize(("arguments", "most", "used"), BUDGETS, ids=str)
def test_a_command_loads_what_it_uses(arguments: tuple[str, ...], most: int, used: str, folder: Path) -> None:
    run = "from kvrsim.cli.main import main; code = main(sys.argv[1:]); assert code == 0, code"
    loaded = loaded_by(run, *arguments, folder=folder)
    unused = (UNUSED | {"numpy"}) - set(used.split()) - (numpys() if "numpy" in used.split() else set())
    assert sorted(loaded & unused) == []
    own = sorted(name for name in loaded if name.split(".")[0] in ROOMS)
    assert len(own) <= most, own
