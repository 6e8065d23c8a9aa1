"""What someone may have meant: the nearest of known names, and quantities in kvrsim's units."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from kvrsim.errors import InputError
from kvrsim.units import (
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_number,
    parse_seconds,
    parse_share,
    parse_tokens,
)

_ALIKE = 0.72  # of SequenceMatcher
# Endings of checkpoints that are the same model to kvrsim, and of files.
_ENDINGS = re.compile(r"(-(instruct|chat|hf|base|it|v0\.\d))+$|\.json$")
_ALSO = {  # what others call it
    **dict.fromkeys(("kvr", "kv-runahead", "kvrunahead", "runahead"), "kvr-s"),
    **dict.fromkeys(("tensor-parallel", "tensor-parallelism", "tensor", "megatron"), "tp"),
    **dict.fromkeys(("pipeline-parallel", "pipeline-parallelism", "pipeline"), "pp"),
    **dict.fromkeys(("context-parallel", "context-parallelism", "cp"), "zigzag"),
    **{"ring-attention": "ring", "striped-attention": "striped", "deepspeed-ulysses": "ulysses", "baseline": "tsp"},
    **dict.fromkeys(("sglang", "engine"), "serving"),
    **dict.fromkeys(("transformers", "huggingface"), "hf-2023"),
    **dict.fromkeys(("trtllm", "trt-llm", "tensorrt"), "tensorrt-llm-0.5"),
    **{"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float8": "fp8", "float32": "fp32", "float": "fp32"},
    **{"flash-attention": "flash", "fa2": "flash", "fa3": "flash", "tensorrt-llm": "trtllm"},
}
_QUANTITY = re.compile(r"([0-9][0-9,_]*(?:\.[0-9]+)?) *(.*)")
_SI = {"kilo": "k", "mega": "M", "giga": "G", "tera": "T"}
_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("ms", "msec", "msecs", "millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("us", "usec", "usecs", "microsecond", "microseconds", "micros"), "us"),
    **dict.fromkeys(("ns", "nsec", "nanosecond", "nanoseconds"), "ns"),
}
_LONGER = {**dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60)} | {
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_COUNTS = {"one": 1, "two": 2, "three": 3, "four": 4, "eight": 8, "sixteen": 16}


def nearest(text: str, known: Sequence[str]) -> str | None:
    """The known name that a text is nearest to, whatever its case, separators and owner; None: none is near."""
    plain = _plain(text)
    if not plain or text in known:
        return None
    also = _ALSO.get(text.lower().replace("_", "-").replace(" ", "-"))
    if also in known:
        return also
    exact = [name for name in known if _plain(name) == plain]
    begun = sorted((name for name in known if len(plain) > 2 and _begins(_plain(name), plain)), key=len)
    if exact or begun:
        return (exact or begun)[0]
    alike = [name for name in known if _numbers(text) <= _numbers(name)]
    scores = [(SequenceMatcher(None, plain, _plain(name)).ratio(), name) for name in alike]
    best = max(scores, default=(0.0, ""), key=lambda pair: pair[0])
    if best[0] >= _ALIKE:
        return best[1]
    within = [name for name in known if re.search(r"\d", _head(name)) and _head(name) in text.lower()]
    return min(within, key=len, default=None)


def _head(name: str) -> str:
    """The first part of a name: h100 of h100-nvlink."""
    return name.partition("-")[0]


def _plain(name: str) -> str:
    """Lower case, letters and digits alone, without the owner of a checkpoint and common endings."""
    return re.sub(r"[^a-z0-9]", "", _ENDINGS.sub("", name.lower().rpartition("/")[2]))


def _begins(name: str, plain: str) -> bool:
    """Whether a name begins so, not in the middle of a number."""
    return name.startswith(plain) and not (plain[-1].isdigit() and name[len(plain) : len(plain) + 1].isdigit())


def _numbers(name: str) -> set[str]:
    return set(re.findall("[0-9]+", _ENDINGS.sub("", name.lower().rpartition("/")[2])))


def respelled(text: str, metavar: str, option: str) -> str | None:
    """A quantity as kvrsim reads it, for an option with this metavar; None: it cannot be told."""
    parsers = {
        "LEN": parse_tokens,
        "N": parse_count,
        "RATE": parse_bandwidth,
        "TIME": parse_seconds,
        "SIZE": parse_bytes,
    }
    ends = re.fullmatch(r"([0-9]+[kKmM]?)(?:-|\.\.|:|to| to )([0-9]+[kKmM]?)", text)
    if ends and metavar.startswith("LEN:LEN:STEP"):
        return f"{ends[1]}:{ends[2]}:x2"
    for part in re.split("[|,]", metavar):
        candidates = _candidates(text.strip(), part, option)
        for candidate in candidates:
            try:
                for one in candidate.split(" or "):
                    parsers.get(part, _number)(one, option)
            except InputError:
                continue
            return candidate
    return None


def _number(text: str, option: str) -> float:
    return parse_share(text, option) if text.endswith("%") else parse_number(text, option)


def _candidates(text: str, metavar: str, option: str) -> Iterator[str]:
    """Ways to write a text with this metavar's units, the likeliest first."""
    if metavar == "N" and text.lower() in _COUNTS:
        yield str(_COUNTS[text.lower()])
    if matched := re.fullmatch(r"(?:p|x)([0-9.]+)", text, re.I):
        text = matched[1]
    matched = _QUANTITY.fullmatch(text)
    if matched is None:
        return
    number, unit = re.sub("[,_]", "", matched[1]), matched[2].strip()
    if metavar == "LEN" and (scale := re.fullmatch(r"([km]?)(i?b|i|tok(en)?s?|t)?", unit.lower().replace(" ", ""))):
        yield number + scale[1]
    elif metavar == "N":
        if re.fullmatch(r"x|x? ?[a-z]?gpus?|ranks?|gpus? .*", unit, re.I) or (unit == "" and number != text):
            yield number
    elif metavar == "RATE":
        yield from _rates(number, unit)
    elif metavar == "TIME":
        yield from _times(number, unit, option)
    elif metavar == "SIZE":
        yield number + (unit.rstrip("bB") or "").replace("k", "K").replace("m", "M").replace("g", "G") + "B"
    elif metavar == "F" and (unit == "%" or float(number) > 1):
        yield f"{float(number) / 100:g}"
    elif metavar == "P":
        yield f"{float(number) * 100:g}" if float(number) <= 1 else number


def _rates(number: str, unit: str) -> Iterator[str]:
    """Bytes or bits per second; both where the unit does not tell which."""
    unit = re.sub(r"\s", "", unit)
    for word, letter in _SI.items():
        unit = re.sub(f"^{word}", letter, unit, flags=re.I)
    matched = re.fullmatch(r"([kKmMgGtT]?)(i?)(bytes?|bits?|[bB])?(/?(?:ps|s|sec|secs|second|seconds))?", unit)
    if matched is None:
        return
    prefix, what = matched[1].upper().replace("K", "k") + matched[2], matched[3] or ""
    prefix = prefix or ("" if what else "G")
    bits = what.lower().startswith("bit") or (what == "b" and matched[1].isupper())
    is_clear = what == "B" or what.lower().startswith("byte") or bits
    if what == "b" and unit.endswith("bps"):
        bits = is_clear = True
    sizes = ["b/s" if bits else "B/s"] if is_clear else ["B/s", "b/s"]
    yield " or ".join(f"{number}{prefix}{size}" for size in sizes)


def _times(number: str, unit: str, option: str) -> Iterator[str]:
    """Seconds, and parts of them; minutes and more in seconds."""
    plain = unit.lower().replace("µ", "u").replace("μ", "u")
    if plain in _SECONDS:
        yield number + _SECONDS[plain]
    elif plain in _LONGER:
        yield f"{float(number) * _LONGER[plain]:g}s"
    elif plain == "":
        yield number + ("us" if "latency" in option else "ms" if float(number) >= 50 and "ttft" in option else "s")
