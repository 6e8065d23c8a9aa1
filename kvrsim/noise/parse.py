"""From `--noise SPEC` to a Noise: terms joined by +, a shipped name, or a JSON file."""

from __future__ import annotations

import re
from pathlib import Path

from kvrsim.errors import InputError
from kvrsim.hardware.uneven import SlowGpu, SlowLink
from kvrsim.io.json_text import JsonObject
from kvrsim.io.schema import read
from kvrsim.noise.model import DWELL_S, LEAST_DWELL_S, MOST_DWELL_S, MOST_SHARE, MOST_SLOWER, Noise, SideTraffic, joined
from kvrsim.units import parse_seconds

ACCEPTED = (
    "terms joined by +: side-traffic:duty=0.5,share=0.67,slowdown=0.03,dwell=10ms, jitter:0.05 or"
    " jitter:compute=0.05,messages=0.1, slow-gpu:3x1.2, slow-link:2-3x4, paper; or a JSON file"
)
_SHIPPED = Path(__file__).parents[1] / "data" / "noise.json"
_SLOW_GPU = re.compile(r"([0-9]{1,6})x([0-9.]{1,12})", re.ASCII)
_SLOW_LINK = re.compile(r"([0-9]{1,6})-([0-9]{1,6})x([0-9.]{1,12})", re.ASCII)
_MOST_JITTER = 2.0
_LIMITS = {"duty": (0.0, 1.0), "share": (0.0, MOST_SHARE), "slowdown": (0.0, MOST_SLOWER)}


def parse_noise(text: str) -> Noise:
    """A noise from a text such as that of --noise; InputError says in one line what is accepted."""
    if text.endswith(".json"):
        return read_noise(JsonObject.read(Path(text), "noise"), name=text)
    return joined([_term(part.strip(), text) for part in text.split("+")], text)


def shipped_noise() -> tuple[str, ...]:
    """Names of the noises that ship."""
    return tuple(name for name in JsonObject.read(_SHIPPED, "noise").fields if not name.startswith("_"))


def _term(part: str, text: str) -> Noise:
    kind, colon, settings = part.partition(":")
    if not colon and kind in shipped_noise():
        return read_noise(JsonObject.read(_SHIPPED, "noise").child(kind), name=kind)
    items = [item.strip() for item in settings.split(",")] if settings.strip() else []
    if kind == "side-traffic":
        return Noise(side_traffic=_side_traffic(items, text))
    if kind == "jitter" and items:
        return _jitter(items, text)
    if kind == "slow-gpu" and items:
        return Noise(slow_gpus=tuple(_slow_gpu(item, text) for item in items))
    if kind == "slow-link" and items:
        return Noise(slow_links=tuple(_slow_link(item, text) for item in items))
    raise _error(text)


def _side_traffic(items: list[str], text: str) -> SideTraffic:
    values: dict[str, float] = {}
    for item in items:
        key, _, value = item.partition("=")
        if key in values or key not in (*_LIMITS, "dwell"):
            raise _error(text)
        values[key] = _dwell(value) if key == "dwell" else _within(value, *_LIMITS[key], text)
    dwell_s = values.pop("dwell", DWELL_S)
    return SideTraffic(**values, dwell_s=dwell_s)


def _jitter(items: list[str], text: str) -> Noise:
    if len(items) == 1 and "=" not in items[0]:
        both = _within(items[0], 0.0, _MOST_JITTER, text)
        return Noise(compute_jitter=both, message_jitter=both)
    values = {key: value for key, _, value in (item.partition("=") for item in items)}
    if len(values) < len(items) or not set(values) <= {"compute", "messages"}:
        raise _error(text)
    found = {key: _within(value, 0.0, _MOST_JITTER, text) for key, value in values.items()}
    return Noise(compute_jitter=found.get("compute", 0.0), message_jitter=found.get("messages", 0.0))


def _slow_gpu(item: str, text: str) -> SlowGpu:
    match = _SLOW_GPU.fullmatch(item)
    if match is None:
        raise _error(text)
    return SlowGpu(rank=int(match[1]), factor=_within(match[2], 1.0, MOST_SLOWER, text))


def _slow_link(item: str, text: str) -> SlowLink:
    match = _SLOW_LINK.fullmatch(item)
    if match is None or match[1] == match[2]:
        raise _error(text)
    first, second = sorted((int(match[1]), int(match[2])))
    return SlowLink(first=first, second=second, factor=_within(match[3], 1.0, MOST_SLOWER, text))


def _dwell(value: str) -> float:
    seconds = parse_seconds(value, "noise dwell")
    if not LEAST_DWELL_S <= seconds <= MOST_DWELL_S:
        raise InputError("noise dwell", value, f"a time from {LEAST_DWELL_S * 1e6:g}us to {MOST_DWELL_S:g}s")
    return seconds


def _within(value: str, low: float, high: float, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise _error(text) from None
    if not low <= number <= high:
        raise InputError("noise", value, f"here a number from {low:g} to {high:g}; in all: {ACCEPTED}")
    return number


def _error(text: str) -> InputError:
    return InputError("noise", text, ACCEPTED)


def read_noise(data: JsonObject, *, name: str = "") -> Noise:
    """Check the keys of a noise, as Noise.to_dict writes them."""
    data.only(("side_traffic", "jitter", "slow_gpus", "slow_links"))
    jitter = data.child("jitter") if data.has("jitter") else None
    if jitter is not None:
        jitter.only(("compute", "messages"))
    parts = [
        Noise(
            side_traffic=read(SideTraffic, data.child("side_traffic")) if data.has("side_traffic") else None,
            compute_jitter=_number(jitter, "compute", 0.0, _MOST_JITTER) if jitter else 0.0,
            message_jitter=_number(jitter, "messages", 0.0, _MOST_JITTER) if jitter else 0.0,
            slow_gpus=tuple(_read_slow_gpu(one) for one in data.children("slow_gpus")),
            slow_links=tuple(_read_slow_link(one) for one in data.children("slow_links")),
        )
    ]
    return joined(parts, name)


def _read_slow_gpu(data: JsonObject) -> SlowGpu:
    data.only(("gpu", "factor"))
    return SlowGpu(rank=data.integer("gpu", minimum=0), factor=_number(data, "factor", 1.0, MOST_SLOWER))


def _read_slow_link(data: JsonObject) -> SlowLink:
    data.only(("gpus", "factor"))
    ends = data.sequence("gpus")
    whole = [end for end in ends if isinstance(end, int) and not isinstance(end, bool) and end >= 0]
    if len(ends) != 2 or len(set(whole)) != 2:
        raise data.error("gpus", "the numbers of two GPUs, such as [2, 3]")
    return SlowLink(first=min(whole), second=max(whole), factor=_number(data, "factor", 1.0, MOST_SLOWER))


def _number(data: JsonObject, key: str, low: float, high: float) -> float:
    if not data.has(key):
        return low
    number = data.number(key, allow_zero=True)
    if not low <= number <= high:
        raise data.error(key, f"a number from {low:g} to {high:g}")
    return number


def noise_of(value: str | Noise | None) -> Noise | None:
    """A noise, parsed where it is text."""
    return parse_noise(value) if isinstance(value, str) else value
