"""`kvrsim completion`: what makes a shell complete command lines, and what it is answered when it does.

The shell runs `kvrsim __complete WORD...` with the words after `kvrsim`; the last one is being typed. The answer has a
line for each way to go on: a word, a tab, what it is. A line `:files` says that a file may stand there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from kvrsim.errors import InputError

FILES = ":files"
_BASH = """\
_kvrsim_completion() {
    local line
    local -a words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == :files ]]; then
            compopt -o default
        else
            COMPREPLY+=("${line%%$'\\t'*}")
        fi
    done < <("$1" __complete "${words[@]}" 2>/dev/null)
}
complete -F _kvrsim_completion kvrsim
"""
_ZSH = """\
#compdef kvrsim
_kvrsim() {
    local line files=
    local -a found=()
    while IFS= read -r line; do
        if [[ $line == :files ]]; then
            files=yes
        else
            found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
        fi
    done < <("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
    (( $#found )) && _describe -V kvrsim found
    [[ -n $files ]] && _files
}
if [[ $funcstack[1] == _kvrsim ]]; then
    _kvrsim "$@"
else
    compdef _kvrsim kvrsim
fi
"""
_FISH = """\
function __kvrsim_completion
    set -l words (commandline --tokenize --current-process --cut-at-cursor)
    set -l typed (commandline --current-token --cut-at-cursor)
    for line in ($words[1] __complete $words[2..] "$typed" 2>/dev/null)
        if test "$line" = :files
            __fish_complete_path "$typed"
        else
            printf '%s\\n' $line
        end
    end
end
complete --command kvrsim --no-files --keep-order --arguments '(__kvrsim_completion)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell to print it for.")],
) -> None:
    """Print a script for a shell that completes kvrsim.

    Add it to your shell's start file; see docs/how-to/shell.md. It completes commands, options and the names of
    models, clusters, profiles, engines and strategies.

    Example: kvrsim completion bash
    """
    if shell not in SCRIPTS:
        raise InputError("bash|zsh|fish", shell, f"one of {', '.join(SCRIPTS)}")
    typer.echo(SCRIPTS[shell], nl=False)


class Choice(NamedTuple):
    """One way to go on."""

    word: str
    about: str = ""


def answer(words: Sequence[str], program: Any) -> Iterator[str]:
    """The lines for a shell that has these words after `kvrsim`, the last of them being typed."""
    for choice in choices(words or [""], program):
        yield choice.word if choice.word == FILES else f"{choice.word}\t{choice.about}"


def choices(words: Sequence[str], program: Any) -> list[Choice]:
    """Ways to go on with the last word; bash splits --model=x into three words, other shells leave it whole."""
    *before, typed = (word for place, word in enumerate(words) if word != "=" or place == len(words) - 1)
    if typed == "=":
        typed = ""
    for_help = before[:1] == ["help"]
    command, path, waiting, given, num_words = _read(before[for_help:], program)
    if waiting is not None:
        return _values(waiting, path, typed)
    if typed.startswith("-") and "=" in typed:
        name, _, value = typed.partition("=")
        param = _options(command).get(name)
        found = [] if param is None else _values(param, path, value)
        return [one if one.word == FILES else Choice(f"{name}={one.word}", one.about) for one in found]
    inner = getattr(command, "commands", None)
    if inner is not None and not typed.startswith("-"):
        names = ((name, _summary(command, name)) for name in inner)
        return [Choice(name, about) for name, about in names if name.startswith(typed)]
    if for_help:
        return []
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    if arguments and not typed.startswith("-"):
        taken = arguments[min(num_words, len(arguments) - 1)]
        return _values(taken, path, typed) if num_words < len(arguments) or taken.nargs != 1 else []
    return [
        Choice(name, _sentence(getattr(param, "help", "")))
        for name, param in _options(command).items()
        if name.startswith("--") and name.startswith(typed) and (param is None or not given & {*param.opts})
    ]


def _read(words: Sequence[str], program: Any) -> tuple[Any, str, Any, set[str], int]:
    """The command that the words name, its path, the option that waits for a value, options and arguments given."""
    command, path, waiting, num_words = program, "", None, 0
    given: set[str] = set()
    for word in words:
        inner = getattr(command, "commands", {})
        if waiting is not None:
            waiting = None
        elif word.startswith("-"):
            name, equals, _ = word.partition("=")
            param = _options(command).get(name)
            given.add(name)
            waiting = param if param is not None and not param.is_flag and not equals else None
        elif word in inner:
            command, path = inner[word], f"{path} {word}".strip()
        else:
            num_words += 1
    return command, path, waiting, given, num_words


def _options(command: Any) -> dict[str, Any]:
    """A command's options by their names; None: --help, which every command has."""
    found = {
        name: param
        for param in command.params
        if param.param_type_name == "option"
        for name in (*param.opts, *param.secondary_opts)
    }
    return {**found, "--help": None}


def _values(param: Any, path: str, typed: str) -> list[Choice]:
    """Values of an option or argument; of a list, for the part after the last comma."""
    from kvrsim.cli.guide.values import values_of

    metavar = param.metavar or ""
    first = typed.rpartition(",")[0] + "," if "," in typed and ("," in metavar or "NAMES" in metavar) else ""
    done = first.split(",")
    known = dict.fromkeys(name for name in values_of(param, path) if name not in done)
    found = [Choice(first + name) for name in known if name.startswith(typed[len(first) :])]
    takes_files = any(word in metavar for word in ("FILE", "PATH", "TABLE", "PREDICTOR", "SOURCE", "ROWS"))
    return [*found, Choice(FILES)] if takes_files else found


def _summary(group: Any, name: str) -> str:
    """Of a command of the program from its table: it is not imported."""
    from kvrsim.cli.lazy import COMMANDS, LazyGroup

    return COMMANDS[name][0] if isinstance(group, LazyGroup) else _sentence(group.commands[name].help)


def _sentence(text: str | None) -> str:
    """The first sentence, on one line."""
    return " ".join((text or "").split()).split(". ")[0].rstrip(".")
