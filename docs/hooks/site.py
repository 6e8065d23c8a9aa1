"""Pages that mkdocs cannot make alone: the command line, the Python reference, notebooks and files outside docs/."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import click
import nbformat
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

import kvrsim
from kvrsim.cli.help import sections_of
from kvrsim.cli.main import GROUPS, app

ROOT = Path(__file__).parents[2]
# Pages of the site whose source is outside docs/: path in the site -> path in the repository.
ELSEWHERE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
# First in the Python reference.
FUNCTIONS = ("plan", "simulate", "capacity", "map_strategies", "calibrate", "confirm", "build_table", "build_predictor")
REPOSITORY_ONLY = ("examples/", "kvrsim/", "planner/", "calibrate/", "validate/", "tests/", "LICENSE", "notebooks/")


def on_config(config: Any) -> Any:
    """Add the version, and links to the repository where the checkout has one on the web."""
    config.copyright = f"kvrsim {kvrsim.__version__}"
    done = subprocess.run(["git", "config", "remote.origin.url"], cwd=ROOT, capture_output=True, text=True, check=False)
    if address := re.fullmatch(r"(?:https://|git@)([^/:]+)[/:](.+?)(?:\.git)?\s*", done.stdout):
        config.repo_url, config.repo_name = f"https://{address[1]}/{address[2]}", address[2]
        config.edit_uri = "edit/main/docs/"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {uri: (ROOT / path).read_text("utf-8") for uri, path in _elsewhere().items()}
    pages["reference/cli.md"] = command_line()
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        _notebook(path, files, config)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files outside docs/ to their pages in the site. A link to a file without a page becomes text.

    In the search, questions and options come first, results, notebooks and the changelog last.
    """
    source = page.file.src_uri
    first = {"how-to/questions.md": 4, "reference/cli.md": 2}
    last = source.startswith(("results/", "notebooks/", "changelog"))
    page.meta["search"] = {"boost": 0.3 if last else first.get(source, 1)}
    if page.file.src_uri == "reference/api.md":
        markdown += python_reference()
    origin = _elsewhere().get(source)
    if source.startswith("notebooks/"):
        origin = source
    folder = os.path.dirname(origin if origin is not None else f"docs/{page.file.src_uri}")

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(os.path.join(folder, target))
        if path.startswith("docs/") and origin is None:
            return match[0]
        uri = {path: uri for uri, path in _elsewhere().items()}.get(path)
        uri = path.removeprefix("docs/") if path.startswith("docs/") else uri
        if uri is not None:
            return f"[{text}]({os.path.relpath(uri, os.path.dirname(page.file.src_uri) or '.')}{anchor})"
        if path.startswith(REPOSITORY_ONLY) or (ROOT / path).is_dir():
            return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}` in the repository)"
        return match[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)", rewritten, markdown)


def _elsewhere() -> dict[str, str]:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    return ELSEWHERE | {f"results/benchmarks/{path.name}": f"benchmarks/results/{path.name}" for path in results}


def _notebook(path: Path, files: Files, config: Any) -> None:
    """A notebook with its stored outputs as a page."""
    notebook = nbformat.read(path, as_version=4)
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)
    for name, content in resources["outputs"].items():
        text = text.replace(f"({name})", f"({path.stem}/{name})")
        files.append(File.generated(config, f"notebooks/{path.stem}/{name}", content=content))
    files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))


def command_line() -> str:
    """Every command with its options, from the code."""
    program = app
    assert isinstance(program, click.Group) or hasattr(program, "commands")
    lines = ["# Command line", "", "Generated from the code. `kvrsim COMMAND --help` prints the same.", ""]
    context = click.Context(program, info_name="kvrsim")
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += _command(program.get_command(context, name), f"kvrsim {name}", context, 3)  # type: ignore[attr-defined]
    return "\n".join(lines) + "\n"


def python_reference() -> str:
    """Every public name of the facade: functions with the arguments that they declare, classes by mkdocstrings."""
    parts: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for name in sorted(kvrsim.__all__, key=lambda name: (*FUNCTIONS, name).index(name)):
        value = getattr(kvrsim, name)
        if inspect.isclass(value):
            part = "Errors" if issubclass(value, Exception) else "Classes"
            target = f"{value.__module__}.{value.__qualname__}"
            parts[part].append(f"::: {target}\n    options:\n      heading: kvrsim.{name}\n")
        elif callable(value):
            parts["Functions"].append(_function(name, value))
    return "\n".join(line for part, blocks in parts.items() for line in ["", f"## {part}", "", *blocks])


def _function(name: str, function: Any) -> str:
    """Signature and numpydoc docstring of a function as Markdown."""
    signature = str(inspect.signature(function)).replace("'", "").replace(": Any", "")
    lines = [f"### kvrsim.{name}", "", "```python", *textwrap.wrap(f"kvrsim.{name}{signature}", 100), "```", ""]
    text = re.sub(r"^(.+)\n-{3,}$", r"\n**\1**\n", inspect.getdoc(function) or "", flags=re.M)
    text = re.sub(r"^(\S+) : (.*)\n    ", r"\n`\1` : \2\n:   ", text, flags=re.M)
    text, title, example = text.partition("**Examples**\n")
    return "\n".join([*lines, text, title, *(["```python", example.strip(), "```"] if title else []), ""])


def _command(command: Any, path: str, parent: click.Context, level: int) -> list[str]:
    context = click.Context(command, info_name=path.rsplit(" ", 1)[1], parent=parent)
    lines = [f"{'#' * level} {path}", "", *(command.help or "").splitlines(), ""]
    if hasattr(command, "commands"):
        for name in command.list_commands(context):
            lines += _command(command.get_command(context, name), f"{path} {name}", context, level + 1)
        return lines
    lines += ["```", " ".join([path, *command.collect_usage_pieces(context)]), "```", ""]
    for title, records in sections_of(command, context):
        lines += [f"**{title}**", ""]
        for name, text in records:
            if "--help" not in name:
                lines += [f"`{name}`", f":   {' '.join(text.split()).replace('<', '&lt;')}", ""]
    return [*lines, f"Example: `{command.example}`", "", ""]
