"""The parquet tables of NVIDIA's PyPI package aiconfigurator-core, found and checked: systems/data/SYSTEM/TABLE."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvrsim.errors import InputError

PREFIX = "aiconfigurator:"
DEFAULT_FRAMEWORK = "vllm"
_PACKAGE = "aiconfigurator_core"
_INSTALL = "a machine that has it (pip install aiconfigurator-core pyarrow, which are the extra kvrsim[import])"
_PRE_RELEASES = {"dev": -4, "a": -3, "b": -2, "rc": -1, "post": 1}


def read_table(
    text: str,
    table: str,
    file: str,
    numbers: Sequence[str],
    texts: Sequence[str] = (),
    *,
    allow_zero: bool = False,
    argument: str = "measurements",
    root: Path | None = None,
) -> tuple[Any, str]:
    """A DataFrame of systems/data/SYSTEM/TABLE/FRAMEWORK/VERSION/FILE, and its source in a few words.

    `text`: aiconfigurator:SYSTEM[/FRAMEWORK[/VERSION]]; without a version the newest that has the file. `numbers`:
    columns of whole numbers, besides latency in ms; `texts`: of texts; `allow_zero`: of the latency. `root`: as of
    read_aiconfigurator. Raises InputError where the package, the table or a column is missing, or a value is not of
    its kind.
    """
    folder = root if root is not None else find_package(text, argument)
    system, framework, version = parse_source(text, argument)
    tables = folder / "systems" / "data" / system / table / framework
    path = newest_table(tables, file, version)
    if path is None or (version is not None and path.parent.name != version):
        raise InputError(argument, text, f"a system, framework and version with {table}/.../{file}")
    frame = read_frame(path, f"{argument} {path}", [*numbers, "latency"], ["device", *texts], allow_zero=allow_zero)
    return frame, f"{package_name(folder)} {system}/{table}/{framework}/{path.parent.name}"


def find_package(text: str, argument: str) -> Path:
    """The folder of the installed package."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"{argument} {text}", "no package aiconfigurator-core", _INSTALL)
    return Path(next(iter(spec.submodule_search_locations)))


def package_name(folder: Path) -> str:
    """The package and, where pip or an unpacked wheel left its name beside it, its version."""
    beside = sorted(folder.parent.glob(f"{_PACKAGE}-*.dist-info"))
    version = beside[-1].name.removesuffix(".dist-info").partition("-")[2] if beside else ""
    return f"aiconfigurator-core {version}".strip()


def parse_source(text: str, argument: str) -> tuple[str, str, str | None]:
    """System, framework and version."""
    match text.removeprefix(PREFIX).split("/"):
        case [system]:
            return system, DEFAULT_FRAMEWORK, None
        case [system, framework]:
            return system, framework, None
        case [system, framework, version]:
            return system, framework, version
    raise InputError(argument, text, f"{PREFIX}SYSTEM[/FRAMEWORK[/VERSION]], such as {PREFIX}h100_sxm/vllm")


def folder_names(folder: Path, *patterns: str) -> list[str]:
    """What stands instead of the first * of patterns, wherever one matches."""
    found = set()
    for pattern in patterns:
        depth = pattern.split("/").index("*")
        found |= {path.relative_to(folder).parts[depth] for path in folder.glob(pattern)}
    return sorted(found)


def check_one_of(text: str, argument: str, what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise InputError(argument, text, f"a {what} among {', '.join(known) or 'none (no tables here)'}")


def newest_table(folder: Path, file: str, version: str | None) -> Path | None:
    """The table of this version, else of the newest version that has it; None where there is none."""
    tables = {path.parent.name: path for path in folder.glob(f"*/{file}")}
    if not tables:
        return None
    return tables[version if version in tables else max(tables, key=version_key)]


def version_key(version: str) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Orders 1.2 < 1.3.0rc10 < 1.3.0rc20 < 1.3.0 < 1.3.0.post2."""
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    numbers = tuple(int(part) for part in release[0].split(".")) if release else ()
    tag = re.match(r"\.?([a-z]+)\.?([0-9]*)", version[len(release[0]) if release else 0 :])
    return numbers, (_PRE_RELEASES.get(tag[1], 0), int(tag[2] or 0)) if tag else (0, 0)


def read_frame(
    path: Path, where: str, numbers: Sequence[str], texts: Sequence[str], *, allow_zero: bool = False
) -> Any:
    """A DataFrame of a parquet table, its columns checked; InputError names the file and the column."""
    import pandas

    try:
        frame = pandas.read_parquet(path, engine="pyarrow")
    except ImportError:
        raise InputError(where, "no pyarrow", _INSTALL) from None
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise InputError(where, error, "a parquet file") from None
    for name in (*numbers, *texts):
        if name not in frame:
            raise InputError(f"{where}: columns", ", ".join(map(str, frame.columns)), f"{name} among them")
    for name in numbers:
        frame[name] = _numbers(frame[name], f"{where}: {name}", allow_zero=allow_zero)
    for name in {*texts, "device"} & set(frame.columns):
        _refuse(~frame[name].map(lambda value: isinstance(value, str)), frame[name], f"{where}: {name}", "a text")
    return frame


def _numbers(written: Any, where: str, *, allow_zero: bool) -> Any:
    """A column as it is computed with: latency in ms, all else in whole numbers."""
    import pandas

    values = pandas.to_numeric(written, errors="coerce")
    if written.name == "latency":
        positive = values >= 0 if allow_zero else values > 0
        _refuse(~(positive & (values < math.inf)), written, where, "ms of at least 0" if allow_zero else "ms above 0")
        return values
    _refuse(~((values >= 0) & (values < 2**62) & (values % 1 == 0)), written, where, "a whole number")
    return values.astype("int64")


def _refuse(faulty: Any, written: Any, where: str, accepted: str) -> None:
    """InputError for the first row that is faulty, if there is one."""
    if faulty.any():
        row = faulty.to_numpy().argmax()
        raise InputError(f"{where}, row {row}", written.iloc[row], accepted)


def merge_rows(frame: Any, shape: list[str]) -> Iterable[tuple[tuple[Any, ...], dict[str, float | None]]]:
    """For each device, kernel and shape: these, and the median and spread of its rows in seconds."""
    keys = ["device", "kernel_source", *shape]
    times = frame.groupby(keys, sort=False)["latency"].agg(["median", "std"]).reset_index()
    columns = [times[name].tolist() for name in (*keys, "median", "std")]
    for *key, median, deviation in zip(*columns, strict=True):
        spread = deviation / 1000 if deviation == deviation else None  # one row has no deviation: nan
        yield tuple(key), {"median_s": median / 1000, "spread_s": spread}
