"""What someone may have meant by an option, a command, or a word in the wrong place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrsim.cli.guide.nearest import nearest, respelled
from kvrsim.cli.guide.values import kind_of, shipped, values_of
from kvrsim.errors import InputError
from kvrsim.units import parse_count, parse_tokens

# What other tools call an option: by kvrsim's name.
_ALSO_OPTIONS = {
    "--ctx": "c tokens context context-length context-len ctx-len seq-len seqlen sequence-length isl input-len"
    " input-tokens prompt-len prompt-tokens length max-model-len max-seq-len",
    "--gpus": "g n num-gpus n-gpus ngpu ngpus gpu-count world-size nproc num-ranks ranks devices"
    " tensor-parallel-size tp",
    "--model": "m model-path model-name config hf-model checkpoint",
    "--cluster": "hardware system machine server node nodes gpu-type hw",
    "--strategies": "s strategy strats parallelism algorithms",
    "--strategy": "s strategies parallelism algorithm",
    "--profile": "p calibration",
    "--batch": "b bs batch-size batchsize num-prompts",
    "--cached-prefix": "prefix prefix-len cached-tokens prefix-cache cache",
    "--dtype": "precision type kv-cache-dtype quantization quant weights-dtype",
    "--attention": "attn attention-backend kernel",
    "--engine": "framework serving backend-framework",
    "--link-bandwidth": "bandwidth bw link-bw network-bandwidth interconnect",
    "--link-latency": "latency alpha",
    "--memory-fraction": "gpu-memory-utilization mem-fraction mem-fraction-static memory",
    "--output": "out output-file outfile",
    "--plot": "chart figure png gantt picture",
    "--trace": "perfetto timeline chrome-trace",
    "--jobs": "j workers processes num-workers parallel",
    "--requests": "workload arrivals input trace trace-file",
    "--slo-ttft": "slo ttft target ttft-slo",
    "--price-per-gpu-hour": "price cost",
    "--partition": "chunks split",
    "--minutes": "time budget",
    "--version": "v V",
}
_ALSO_COMMANDS = {
    "plan": "predict estimate optimize optimise search best ttft compare",
    "simulate": "sim simulation",
    "confirm": "verify check measure",
    "run": "bench benchmark exec prefill",
    "calibrate": "calibration profile-machine fit measure-machine",
    "capacity": "size fleet slo sizing",
    "clusters": "gpus hardware machines cluster gpu",
    "strategies": "strategy",
    "table": "tables",
    "list": "ls all",
    "show": "info describe get cat print",
    "help": "man usage",
}
_LISTED = ("models", "clusters", "profiles", "engines", "strategies")  # each a command with list and show
_UNITS = re.compile(r"(tokens?|[kKmMgGtT]?i?[bB](its?)?(/s|ps)?|n?s|us|µs|ms|seconds?|gpus?)", re.I)


def options_of(command: Any) -> dict[str, Any]:
    """A command's parameters by their options."""
    return {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}


def meant_option(given: str, command: Any, path: str, program: Any) -> str | None:
    """The option meant by one that a command has not got: its own, or another command's."""
    options = [name for name in options_of(command) if name.startswith("--")] + ["--help"]
    plain = re.sub(r"^[-–—]+", "", given).replace("_", "-")
    if (form := {"csv": "csv", "md": "md", "markdown": "md"}.get(plain)) and "--format" in options:
        return f"--format {form}"
    if f"--{plain}" in options:
        return f"--{plain}"
    found = next((name for name, words in _ALSO_OPTIONS.items() if plain in words.split() and name in options), None)
    found = found or nearest(plain.lower(), [name[2:] for name in options])
    if found is not None:
        return found if found.startswith("--") else f"--{found}"
    others = [name for name, other in _leaves(program, "") if f"--{plain}" in options_of(other) and name != path]
    return f"kvrsim {others[0]} --{plain}" if others else None


def _leaves(command: Any, path: str) -> list[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(path, command)]
    return [leaf for name, child in inner.items() for leaf in _leaves(child, f"{path} {name}".strip())]


def meant_command(words: Sequence[str], group: Any, path: str) -> str | None:
    """A command line meant by words of which the first is no command of the group."""
    first, rest = words[0], [word for word in words[1:2] if not word.startswith("-")]
    names, at_top, verb = list(group.commands), path == "kvrsim", _verb(words[0])
    if at_top and first in ("version", "v"):
        return "kvrsim --version"
    other = _command(rest[0], names) if at_top and verb and rest and rest[0] not in _shipped() else None
    if other is not None:  # list models
        return " ".join([path, other, str(verb), *words[2:3]])
    if (found := _command(first, names)) is not None and not (at_top and verb):
        inner = getattr(group.commands[found], "commands", {})
        second = next((word for word in rest if word in inner), _verb(rest[0]) if rest else None)
        more = [] if second is None or second not in inner else [second, *words[2:3]]
        return " ".join([path, found, *more])
    for name in _LISTED if at_top else (path.partition(" ")[2],):
        for word in words[:2] if verb else words[:1]:
            if name in _LISTED and (known := word if word in shipped(name) else nearest(word, shipped(name))):
                return f"kvrsim {name} show {known}"
    option = _as_value(first, group.commands["plan"], "plan") if at_top else None
    return None if option is None else f"kvrsim plan {option}"


def _command(word: str, names: Sequence[str]) -> str | None:
    """The command of a group that a word is, is another name of, or is near to."""
    if word in names:
        return word
    found = next((name for name, also in _ALSO_COMMANDS.items() if word in also.split() and name in names), None)
    return found or (nearest(word.lower(), names) if len(word) > 1 else None)


def _verb(word: str) -> str | None:
    return next((verb for verb in ("list", "show") if word == verb or word in _ALSO_COMMANDS[verb].split()), None)


def _shipped() -> set[str]:
    return {name for kind in _LISTED for name in shipped(kind)}


def meant_words(words: Sequence[str], before: Sequence[str], command: Any, path: str) -> str | None:
    """Options meant by words that stand alone; `before`: all words before the first of them."""
    if len(before) > 1 and re.search(r"\d[kKmM]?$", before[-1]) and _UNITS.fullmatch(words[0]):
        return f"{before[-2]} {before[-1]}{'' if words[0].startswith('token') else words[0]}"
    if words[0] == "help":
        return f"kvrsim help {path}"
    found: list[str] = []
    left = list(words)
    while left:
        option = _as_value(left.pop(0), command, path, used=" ".join(found))
        if option is None:
            return None
        found.append(f"{option} {left.pop(0)}" if left and " " not in option else option)
    return " ".join(found)


def _as_value(word: str, command: Any, path: str, used: str = "") -> str | None:
    """The option that a word is a value or a name of."""
    options = options_of(command)
    name, equals, value = re.sub(r"^[–—]+", "", word).partition("=")
    if f"--{name}" in options:
        return f"--{name}{' ' if equals else ''}{value}"
    for option, param in options.items():
        names = shipped(kind) if (kind := kind_of(param, path)) and option.startswith("--") else ()
        if word in names or (names and nearest(word, names)):
            return f"{option} {word if word in names else nearest(word, names)}"
    if "--requests" in options and (Path(word).suffix in (".csv", ".jsonl") or word.startswith("synthetic:")):
        return f"--requests {word}"
    for option, parse in (("--ctx", parse_tokens), ("--gpus", parse_count)):
        if option in options and option not in used:
            try:
                parse(word, option)
            except InputError:
                continue
            return f"{option} {word}"
    return None


def meant_value(text: str, option: str, param: Any, command: Any, path: str, accepted: str) -> str | None:
    """The value meant by a text that an option refuses, where a line says what it accepts."""
    if option == "--format" and text == "json":
        return "--json"
    if option == "--requests" and re.match(r"[a-z]+,(.*,)?rate=", text):
        return f"synthetic:{text}"
    if text not in shipped(kind_of(param, path) or "gpus") and (other := _of_another_kind(text, command, path)):
        return other
    known = values_of(param, path)
    words = set(re.split(r"[,;:]? ", accepted))
    if kind_of(param, path) is None and words & set(known):  # not all of them, perhaps
        known = tuple(word for word in known if word in words)
    if {*text.split(",")} & {*known}:
        return None
    found = nearest(text, known) or respelled(text, param.metavar or "", option)
    return None if found == text else found


def _of_another_kind(text: str, command: Any, path: str) -> str | None:
    """The option that takes a name that ships."""
    kinds = {name: kind_of(param, path) for name, param in options_of(command).items() if name.startswith("--")}
    return next((f"{name} {text}" for name, kind in kinds.items() if kind in _LISTED and text in shipped(kind)), None)


def shortened(accepted: str, param: Any, path: str) -> str:
    """What is accepted. A long list of built-in names is replaced by the command that prints it."""
    kind = kind_of(param, path)
    if kind not in _LISTED:
        return accepted
    name = f"(?:{'|'.join(map(re.escape, shipped(kind)))})(?![\\w.+-])"
    accepted = re.sub(f", such as {name}(?:, {name})*$", "", accepted)
    found = re.search(f"{name}(?:, {name})+", accepted)
    if found is None or len(found[0].split(", ")) < len(shipped(kind)):
        return accepted
    return f"{accepted[: found.start()]}those of kvrsim {kind} list{accepted[found.end() :]}"
