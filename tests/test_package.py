"""The package that users install: wheel and sdist, and commands in a new environment that has only the wheel."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml

from kvrsim.version import __version__, data_digest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MOST_WHEEL_BYTES = 1_204_999
PLAN = "plan --gpus 2 --ctx 2k --strategies tsp,kvr-s --json"
CAPACITY = (
    "capacity llama-3.1-8b 8xh100 --requests synthetic:poisson,rate=1,requests=50,context=1k "
    "--slo-ttft 2s --group-sizes 1 --replications 1 --json"
)
REQUIRED = os.environ.get("KVRSIM_PACKAGE") == "1"  # set by .ci/run, where the package index must be reached


def environment(**changes: str) -> dict[str, str]:
    """Variables with which Python sees no module of the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | changes


def outside(command: Sequence[str | Path], **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout's environment."""
    return subprocess.run(command, env=environment(**changes), capture_output=True, text=True, check=False)


def uv(*arguments: str | Path) -> str:
    """The output of uv; without a package index, the test is skipped unless KVRSIM_PACKAGE=1."""
    program = Path(sys.executable).with_name("uv")
    if not program.exists() and not REQUIRED:
        pytest.skip("uv is not installed")
    done = outside([program, *arguments])
    if done.returncode and not REQUIRED and re.search("Failed to fetch|error sending request", done.stderr):
        pytest.skip("the package index is not reached")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--out-dir", folder, ROOT)
    return folder


def wheel(folder: Path) -> Path:
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_wheel_and_sdist_pass_the_checks_of_an_index(built: Path) -> None:
    files = sorted(built.glob("kvrsim-*"))
    assert [file.name for file in files] == [f"kvrsim-{__version__}-py3-none-any.whl", f"kvrsim-{__version__}.tar.gz"]
    done = outside([sys.executable, "-m", "twine", "check", "--strict", *files])
    assert done.returncode == 0, done.stdout
    assert wheel(built).stat().st_size <= MOST_WHEEL_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_commands_of_a_new_environment_with_only_the_wheel(built: Path, tmp_path: Path, python: str) -> None:
    search = ("python", "find", "--no-python-downloads", python)
    interpreter = outside([Path(sys.executable).with_name("uv"), *search], PYENV_VERSION=python)
    if interpreter.returncode:
        pytest.skip(f"no Python {python} here; the workflow of .github has it")
    uv("venv", "--quiet", "--python", interpreter.stdout.strip(), tmp_path / "new")
    programs = tmp_path / "new" / "bin"
    into = ("--quiet", "--python", programs / "python")
    uv("pip", "install", *into, "--constraint", ROOT / "constraints.txt", wheel(built))
    uv("pip", "check", *into)
    version = outside([programs / "kvrsim", "--version"])
    assert version.stdout == f"kvrsim {__version__}, data {data_digest()}\n", "the wheel has all data"
    plan = outside([programs / "kvrsim", *PLAN.split()])
    assert json.loads(plan.stdout)["best"]["strategy"] == "kvr-s", plan.stderr
    if python != f"{sys.version_info.major}.{sys.version_info.minor}":
        return
    fleet = outside([programs / "kvrsim", *CAPACITY.split()])
    assert json.loads(fleet.stdout)["answer"]["num_gpus"] >= 1, fleet.stderr
    serve(programs / "kvrsim")


def serve(program: Path) -> None:
    """Start the server, and read its first page."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "serve", "--no-browser", "--port", str(port)]
    unbuffered = environment(PYTHONUNBUFFERED="1")
    with subprocess.Popen(command, env=unbuffered, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+/", server.stdout.readline())
            assert address is not None
            with urlopen(address[0]) as page:
                assert b"kvrsim" in page.read()
        finally:
            server.terminate()


# -- files for adopters


def read_yaml(path: str) -> dict[object, object]:
    content = yaml.safe_load((ROOT / path).read_text("utf-8"))
    assert isinstance(content, dict)
    return content


def test_the_workflow_runs_the_checks_and_all_pythons_of_the_package() -> None:
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    assert any(step.get("run") == "bash .ci/run" for step in jobs["checks"]["steps"])
    prefix = "Programming Language :: Python :: 3."
    classifiers = [one.removeprefix(prefix[:-2]) for one in PROJECT["classifiers"] if one.startswith(prefix)]
    assert jobs["wheel"]["strategy"]["matrix"]["python"] == [name for name in classifiers if "." in name]
    assert tuple(jobs["wheel"]["strategy"]["matrix"]["python"]) == PYTHONS


def test_pre_commit_runs_the_ruff_of_the_constraints() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), flags=re.M))
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    ruff = [hook for hook in repository["hooks"] if hook["entry"].startswith("ruff")]
    assert ruff
    assert all(hook["additional_dependencies"] == [f"ruff=={pins['ruff']}"] for hook in ruff)


def test_the_citation_names_this_version_and_the_paper() -> None:
    citation = read_yaml("CITATION.cff")
    assert citation["version"] == PROJECT["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert citation["references"][0]["url"] == PROJECT["urls"]["Paper"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_have_the_parts_of_github(path: Path) -> None:
    form = read_yaml(str(path.relative_to(ROOT)))
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= set(form)
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    identifiers = [part["id"] for part in fields]
    assert len(set(identifiers)) == len(identifiers)
    assert all(part["attributes"]["label"] for part in fields)
    assert {part["type"] for part in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
