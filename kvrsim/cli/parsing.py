"""Values of options from text: lists, choices, files, noise; InputError names the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrsim.errors import InputError

if TYPE_CHECKING:
    from planner.table.table import PartitionTable


def parse_list(text: str, parameter: str, accepted: str) -> list[str]:
    """The parts of a list with commas; InputError where there is an empty one."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(parameter, text, accepted)
    return parts


def parse_strategies(text: str) -> list[str]:
    """Names with commas between, each once, in the order given; "all" stands for every one that runs."""
    from kvrsim.strategies import STRATEGIES, get_strategy

    accepted = f"names out of {', '.join(STRATEGIES)}, or FILE.py:NAME, with commas between"
    names = parse_list(text, "strategies", accepted)
    for name in names:
        if name != "all":
            get_strategy(name, "strategies")
    return list(dict.fromkeys(names))


def parse_strategy(text: str) -> str:
    """One strategy, as it was named: "kvr-s", "tp8+kvr-s" or "FILE.py:NAME"."""
    from kvrsim.strategies import get_strategy

    get_strategy(text)
    return text


def parse_chunks(text: str | None) -> list[int] | None:
    """The chunk lengths of --partition; None where it was not given."""
    if text is None:
        return None
    from kvrsim.units import parse_tokens

    accepted = "chunk lengths with commas between, such as 5000,3192"
    return [parse_tokens(part, "partition") for part in parse_list(text, "partition", accepted)]


def parse_seed(text: str) -> int:
    """A whole number from 0 to 4294967295."""
    from kvrsim.units import parse_count

    return parse_count(text, "seed", minimum=0, maximum=2**32 - 1)


def parse_choice(text: str | None, parameter: str, choices: Sequence[str]) -> None:
    """Refuse what is not one of the choices; None: the option was not given."""
    if text is not None and text not in choices:
        raise InputError(parameter, text, f"one of {', '.join(choices)}")


def read_table(path: str | None) -> PartitionTable | None:
    """The partition table named by --table."""
    if path is None:
        return None
    from planner.table.table import load_table

    return load_table(path)


def require_table(names: Sequence[str], table: str | None) -> None:
    """Refuse before the work where a strategy has no table to look its chunks up in."""
    from kvrsim.strategies import get_strategy

    for name in names if table is None else ():
        if name != "all" and get_strategy(name).partition_rule == "table":
            raise InputError("table", "nothing", f"a file of kvrsim table build, for {name}")


def check_output(path: str | None, parameter: str) -> None:
    """Complain before the work, rather than after it, where a file cannot be written."""
    if path is None:
        return
    if path.startswith("-"):  # another command's standard output, or an option whose file was forgotten
        raise InputError(parameter, path, f"a file; ./{path} is one of this name")
    from kvrsim.io.files import check_writable

    check_writable(path, parameter)


def check_plot(path: str | None, *, page: bool = False) -> None:
    """The same for --plot, whose suffix says what kind of picture it is; page: .html is one of them."""
    if path is not None:
        from kvrsim.views.figure import check_suffix

        check_suffix(path, page=page)
        check_output(path, "plot")
