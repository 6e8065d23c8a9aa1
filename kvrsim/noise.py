"""Noise of a prefill: its model, its text form, random draws and statistics."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from kvrsim.errors import InputError
from kvrsim.hardware import Cluster, SlowGpu, SlowLink, UnevenCluster
from kvrsim.io.schema import JsonObject, Range, Share, fields_to_json, read
from kvrsim.program import Array
from kvrsim.units import parse_seconds

Spread = Annotated[float, Range(least=0.0, most=2.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SideTraffic:
    """Traffic of other programs, in both directions, between one pair of neighbouring GPUs, drawn for each time slot.

    While a pair carries the traffic, its link has `1 - share` of its bandwidth left and both GPUs compute slower:
    copies take memory bandwidth, and a library's send and receive kernels take multiprocessors.
    """

    duty: Share = 1.0  # share of the time slots with traffic, 0 to 1
    # Share of the pair's bandwidth that the traffic takes; messages need the rest.
    share: Annotated[float, Range(least=0.0, most=0.999)] = 0.5
    slowdown: Annotated[float, Range(least=0.0, most=1000.0)] = 0.0  # operations take 1 + slowdown times as long
    dwell_s: Annotated[float, Range(least=1e-4, most=1e6)] = 0.01  # seconds of a time slot

    @property
    def is_quiet(self) -> bool:
        """Whether the traffic has no effect on times."""
        return self.duty == 0 or (self.share == 0 and self.slowdown == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """All noise of a prefill: a fixed part, which the planner knows, and a random part, which is drawn."""

    side_traffic: SideTraffic | None = None
    compute_jitter: Spread = 0.0  # standard deviation of the logarithm of an operation's time; the mean does not change
    message_jitter: Spread = 0.0  # standard deviation of the logarithm of a message's time; the mean is kept
    slow_gpus: tuple[SlowGpu, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()
    name: str = field(default="", compare=False)  # text of the noise, as the user wrote it

    @property
    def is_random(self) -> bool:
        """Whether two runs may differ."""
        traffic = self.side_traffic is not None and not self.side_traffic.is_quiet
        return traffic or self.compute_jitter > 0 or self.message_jitter > 0

    def place_on(self, cluster: Cluster) -> Cluster:
        """Return the cluster with slow GPUs and links: the part of the noise that is the same in every run.

        Raises InputError for a GPU or a link that does not exist, and on a bus for noise of single links.
        """
        last = cluster.num_gpus - 1
        for gpu in self.slow_gpus:
            if gpu.rank > last:
                raise InputError("noise", f"slow-gpu:{gpu.rank}", f"a GPU from 0 to {last}")
        for link in self.slow_links:
            if link.second > last:
                raise InputError("noise", f"slow-link:{link.first}-{link.second}", f"GPUs from 0 to {last}")
            if cluster.topology == "chain" and link.second != link.first + 1:
                raise InputError("noise", f"slow-link:{link.first}-{link.second}", "neighbours, since it is a chain")
        has_traffic = self.side_traffic is not None and not self.side_traffic.is_quiet
        if cluster.shares_bandwidth and (self.slow_links or has_traffic):
            what = "side-traffic"
            instead = "its traffic is a lower --link-bandwidth"
            if self.slow_links:
                what = "slow-link"
                instead = "all GPUs share its bandwidth"
            raise InputError("noise", what, f"jitter or slow-gpu on a bus, which has no link of a pair: {instead}")
        return UnevenCluster.of(cluster, self.slow_gpus, self.slow_links)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        traffic = self.side_traffic
        content: dict[str, Any] = {}
        if traffic is not None:
            content["side_traffic"] = fields_to_json(traffic)
        if self.compute_jitter or self.message_jitter:
            content["jitter"] = {"compute": self.compute_jitter, "messages": self.message_jitter}
        if self.slow_gpus:
            content["slow_gpus"] = [{"gpu": gpu.rank, "factor": gpu.factor} for gpu in self.slow_gpus]
        if self.slow_links:
            content["slow_links"] = [{"gpus": [one.first, one.second], "factor": one.factor} for one in self.slow_links]
        return content

    def describe(self) -> str:
        """Describe the noise in one line."""
        return "; ".join(self._parts()) or "none"

    def _parts(self) -> Iterator[str]:
        if traffic := self.side_traffic:
            yield (
                f"side traffic {traffic.duty:.0%} of the time on {traffic.share:.0%} of a pair's link, compute there"
                f" {traffic.slowdown:.1%} slower, a pair for {traffic.dwell_s * 1e3:g} ms"
            )
        if self.compute_jitter or self.message_jitter:
            yield f"jitter {self.compute_jitter:.1%} of operations, {self.message_jitter:.1%} of messages"
        for gpu in self.slow_gpus:
            yield f"GPU {gpu.rank} {gpu.factor:g} times slower"
        for link in self.slow_links:
            yield f"link {link.first}-{link.second} {link.factor:g} times slower"


_BLOCK = 512  # slots or factors drawn at a time
_TRAFFIC, _COMPUTE, _MESSAGES = range(3)  # numbers of a sample's random generators


class NoiseDraw:
    """The random part of a noise, drawn for one or many runs; the last axis of arrays is the sample.

    Each run (a sample) has its own random generators, one per kind of noise and place (a rank or a link). A sample of a
    seed is therefore the same for every partition and strategy (common random numbers), and in every set of samples.
    """

    def __init__(self, noise: Noise, num_ranks: int, *, seed: int, samples: Sequence[int] = (0,)) -> None:
        """`samples` are the numbers of the runs; runs of one seed with different numbers are independent."""
        self.noise = noise
        self.seed = seed
        self.samples = tuple(samples)
        self.num_samples = len(samples)
        self.num_ranks = num_ranks
        roots = [(seed, sample) for sample in samples]
        traffic = noise.side_traffic
        quiet = traffic is None or traffic.is_quiet or num_ranks < 2
        self.slots = None if quiet or traffic is None else _Slots(traffic, num_ranks, roots)
        self.compute_jitter = _Jitter(noise.compute_jitter, (_COMPUTE,), roots)
        self.message_jitter = _Jitter(noise.message_jitter, (_MESSAGES,), roots)

    def only(self, indices: Sequence[int]) -> NoiseDraw:
        """Return the draw with only some of the samples."""
        samples = [self.samples[index] for index in indices]
        return NoiseDraw(self.noise, self.num_ranks, seed=self.seed, samples=samples)

    def compute_end_s(self, rank: int, index: int, start_s: Array, device_s: Array) -> Array:
        """Time at which a rank's index-th computation ends if it begins at `start_s`."""
        return self._end_s((rank,), start_s, device_s * self.compute_jitter((rank,), index))

    def message_end_s(self, src: int, dst: int, index: int, start_s: Array, busy_s: Array) -> Array:
        """Time at which the index-th message from `src` to `dst` has left if it begins at `start_s`."""
        return self._end_s((src, dst), start_s, busy_s * self.message_jitter((src, dst), index))

    def _end_s(self, place: tuple[int, ...], start_s: Array, seconds: Array) -> Array:
        warp = None if self.slots is None else self.slots.warp(place)
        return start_s + seconds if warp is None else warp.end_s(start_s, seconds)


@dataclasses.dataclass(slots=True)
class _Jitter:
    """Lognormal factors of mean 1, by place (a rank or a link) and index."""

    log_sd: float
    kind: tuple[int, ...]
    roots: list[tuple[int, int]]
    # Factors by place, in arrays of shape (_BLOCK, samples).
    factors: dict[tuple[int, ...], list[Array]] = field(default_factory=dict)
    generators: dict[tuple[int, ...], list[np.random.Generator]] = field(default_factory=dict)

    def __call__(self, place: tuple[int, ...], index: int) -> Array | float:
        """Factor of the index-th operation at a place, shape (samples,); 1.0 without jitter."""
        if not self.log_sd:
            return 1.0
        blocks = self.factors.setdefault(place, [])
        while len(blocks) <= index // _BLOCK:
            if place not in self.generators:
                self.generators[place] = [np.random.default_rng([*root, *self.kind, *place]) for root in self.roots]
            normal = np.stack([rng.standard_normal(_BLOCK) for rng in self.generators[place]], axis=1)
            blocks.append(np.exp(self.log_sd * normal - self.log_sd**2 / 2))
        return np.asarray(blocks[index // _BLOCK][index % _BLOCK])


class _Slots:
    """The pair of neighbours that carries side traffic in each time slot."""

    def __init__(self, traffic: SideTraffic, num_ranks: int, roots: list[tuple[int, int]]) -> None:
        self.traffic = traffic
        self.num_pairs = num_ranks - 1
        self.generators = [np.random.default_rng([*root, _TRAFFIC]) for root in roots]
        self.phase_s = np.array([rng.random() for rng in self.generators]) * traffic.dwell_s
        self.pairs: npt.NDArray[np.int64] = np.zeros((len(roots), 0), dtype=np.int64)  # pair per slot; -1: none
        self.warps: dict[tuple[int, ...], Warp | None] = {}

    def warp(self, place: tuple[int, ...]) -> Warp | None:
        """The speed of a rank or of a link over time; None if constant. place: (rank,), or (src, dst) of a link."""
        if place not in self.warps:
            first = min(place)
            last = max(place)
            if first == last:  # a rank, which is in the pairs to its left and to its right
                pairs = [pair for pair in (first - 1, first) if 0 <= pair < self.num_pairs]
                slow = 1.0 / (1.0 + self.traffic.slowdown)
            else:
                pairs = [first] if last == first + 1 else []
                slow = 1.0 - self.traffic.share
            self.warps[place] = Warp(self, pairs, slow) if pairs and slow < 1.0 else None
        return self.warps[place]

    def draw_to(self, num_slots: int) -> None:
        """Draw at least this number of slots of every sample."""
        while self.pairs.shape[1] < num_slots:
            # Pair and presence of traffic are drawn separately, so that a higher duty only adds traffic.
            block = [
                np.where(rng.random(_BLOCK) < self.traffic.duty, rng.integers(0, self.num_pairs, _BLOCK), -1)
                for rng in self.generators
            ]
            self.pairs = np.concatenate([self.pairs, np.stack(block)], axis=1)


class Warp:
    """Speed over time: `slow` while one of `pairs` carries side traffic, else 1; one row of slots per sample."""

    def __init__(self, slots: _Slots, pairs: list[int], slow: float) -> None:
        self.slots = slots
        self.pairs = pairs
        self.slow = slow
        self.dwell_s = slots.traffic.dwell_s
        self._extend(_BLOCK)

    def _extend(self, num_slots: int) -> None:
        """Compute the work done by the start of each slot, in seconds at full speed."""
        self.slots.draw_to(num_slots)
        busy = np.isin(self.slots.pairs, self.pairs)
        speed = np.where(busy, self.slow, 1.0)
        done = np.cumsum(speed, axis=1) * self.dwell_s
        done = np.concatenate([np.zeros((len(done), 1)), done], axis=1)
        self.width = speed.shape[1]
        self.least_done_s = float(done[:, -1].min())
        # The values of each row are shifted beyond those of the previous row, so that one search serves all rows.
        rows = np.arange(len(done))
        self.apart_s = float(done[:, -1].max()) + self.dwell_s
        self.edges = (done[:, 1:] + rows[:, None] * self.apart_s).ravel()
        self.speed = speed.ravel()
        self.done = done[:, :-1].ravel()
        self.first = rows * self.width
        self.shift_s = rows * self.apart_s

    def end_s(self, start_s: Array, work_s: Array) -> Array:
        """Time at which work of `work_s` seconds at full speed ends; shapes (..., samples)."""
        since = np.asarray(start_s + self.slots.phase_s)
        latest = float(since.max()) if since.size else 0.0
        while latest + self.dwell_s > self.width * self.dwell_s:
            self._extend(2 * self.width)
        slot = (since / self.dwell_s).astype(np.int64)
        here = slot + self.first
        target = self.done[here] + (since - slot * self.dwell_s) * self.speed[here] + work_s
        while float(target.max()) >= self.least_done_s:
            self._extend(2 * self.width)
            return self.end_s(start_s, work_s)
        there = np.searchsorted(self.edges, target + self.shift_s, side="left")
        ended = (there - self.first) * self.dwell_s + (target - self.done[there]) / self.speed[there]
        # A rounding error must not end work earlier than without side traffic.
        return np.asarray(np.maximum(ended - self.slots.phase_s, start_s + work_s))


ACCEPTED = (
    "terms joined by +: side-traffic:duty=0.5,share=0.67,slowdown=0.03,dwell=10ms, jitter:0.05 or"
    " jitter:compute=0.05,messages=0.1, slow-gpu:3x1.2, slow-link:2-3x4, paper"
)
_SHIPPED = Path(__file__).parent / "data" / "noise.json"
_NUMBER = r"([0-9.]{1,12})"
_SLOW_GPU = re.compile(rf"([0-9]{{1,6}})x{_NUMBER}", re.ASCII)
_SLOW_LINK = re.compile(rf"([0-9]{{1,6}})-([0-9]{{1,6}})x{_NUMBER}", re.ASCII)


def parse_noise(text: str) -> Noise:
    """Parse the text of --noise. Raises InputError with the accepted forms."""
    content: dict[str, Any] = {}
    for part in text.split("+"):
        values = _term(part.strip(), text)
        if content.keys() & values.keys():
            raise InputError("noise", text, "each kind of noise once")
        content |= values
    noise = read(Noise, JsonObject(fields=content, where="noise"), name=text)
    gpus = noise.slow_gpus
    links = noise.slow_links
    if len({one.rank for one in gpus}) < len(gpus) or len({(one.first, one.second) for one in links}) < len(links):
        raise InputError("noise", text, "each GPU and link once")
    if any(link.first == link.second for link in links):
        raise InputError("noise", text, "links between two GPUs, such as 2-3")
    return noise


def shipped_noise() -> Mapping[str, JsonObject]:
    """The noises that ship with kvrsim, by name."""
    content = JsonObject.read(_SHIPPED, "noise")
    return {name: content.child(name) for name in content.fields}


def _term(part: str, text: str) -> dict[str, Any]:
    """Parse one term of --noise into fields of Noise, as plain JSON values."""
    kind, colon, settings = part.partition(":")
    if not colon and kind in (shipped := shipped_noise()):
        return dict(shipped[kind].fields)
    items = [item.strip() for item in settings.split(",")] if settings.strip() else []
    try:
        match kind, items:
            case "side-traffic", _:
                return {"side_traffic": _settings(items, ("duty", "share", "slowdown", "dwell"))}
            case "jitter", [str(both)] if "=" not in both:
                return {"compute_jitter": float(both), "message_jitter": float(both)}
            case "jitter", [_, *_]:
                jitter = {"compute": 0.0, "messages": 0.0} | _settings(items, ("compute", "messages"))
                return {"compute_jitter": jitter["compute"], "message_jitter": jitter["messages"]}
            case "slow-gpu", [_, *_]:
                gpus = [_groups(_SLOW_GPU, item) for item in items]
                return {"slow_gpus": [{"rank": int(gpu), "factor": float(factor)} for gpu, factor in gpus]}
            case "slow-link", [_, *_]:
                links = [(sorted((int(a), int(b))), float(by)) for a, b, by in (_groups(_SLOW_LINK, i) for i in items)]
                return {"slow_links": [{"first": ab[0], "second": ab[1], "factor": by} for ab, by in links]}
    except ValueError:
        pass
    raise InputError("noise", text, ACCEPTED)


def _settings(items: list[str], names: tuple[str, ...]) -> dict[str, float]:
    """Parse items such as "duty=0.5"; each name may occur once. Raises ValueError for other items."""
    values: dict[str, float] = {}
    for name, _, value in (item.partition("=") for item in items):
        if name not in names or name in values:
            raise ValueError
        values[name] = parse_seconds(value, "noise dwell") if name == "dwell" else float(value)
    return {"dwell_s" if name == "dwell" else name: value for name, value in values.items()}


def _groups(pattern: re.Pattern[str], item: str) -> tuple[str, ...]:
    """The groups of the pattern in an item. Raises ValueError where the item has another form."""
    match = pattern.fullmatch(item)
    if match is None:
        raise ValueError
    return match.groups()


_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_DEVIATES_OF_95_PERCENT = 1.959964  # end of a normal distribution's central 95 %, in standard deviations


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A statistic of a distribution, estimated from samples, and its 95 % confidence limits."""

    value_s: float
    low_s: float | None  # lower confidence limit; None: too few samples
    high_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Statistics of the TTFTs of runs that differ only in the noise drawn."""

    num_samples: int
    seed: int
    quiet_s: float  # TTFT without noise, on GPUs and links that are all alike
    mean: Estimate
    p50: Estimate
    p95: Estimate
    p99: Estimate
    worst_s: float
    samples_s: tuple[float, ...] = field(repr=False)  # TTFTs of all runs, ascending

    @classmethod
    def of(cls, ttft_s: Sequence[float], *, quiet_s: float, seed: int) -> Distribution:
        """Compute the statistics of the samples."""
        ordered = np.sort(np.asarray(ttft_s, dtype=float))
        percentiles = {name: _percentile(ordered, share) for name, share in _SHARES.items()}
        return cls(
            num_samples=len(ordered),
            seed=seed,
            quiet_s=quiet_s,
            mean=_mean(ordered),
            worst_s=float(ordered[-1]),
            samples_s=tuple(ordered.tolist()),
            **percentiles,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        content: dict[str, Any] = {"samples": self.num_samples, "seed": self.seed, "quiet_ttft_s": self.quiet_s}
        for name in ("mean", *_SHARES):
            estimate: Estimate = getattr(self, name)
            content[f"{name}_s"] = estimate.value_s
            content[f"{name}_low_s"] = estimate.low_s
            content[f"{name}_high_s"] = estimate.high_s
        return content | {"worst_s": self.worst_s, "mean_increase": self.mean.value_s / self.quiet_s - 1}


def _mean(ordered: np.typing.NDArray[np.float64]) -> Estimate:
    mean = float(ordered.mean())
    count = len(ordered)
    if count < 2:
        return Estimate(value_s=mean, low_s=None, high_s=None)
    half = _DEVIATES_OF_95_PERCENT * float(ordered.std(ddof=1)) / math.sqrt(count)
    return Estimate(value_s=mean, low_s=mean - half, high_s=mean + half)


def _percentile(ordered: np.typing.NDArray[np.float64], share: float) -> Estimate:
    """Percentile with limits by order statistics: the number of samples below is binomial for any distribution."""
    count = len(ordered)
    below = np.cumsum([_binomial(count, below, share) for below in range(count + 1)])
    low = int(np.searchsorted(below, 0.025))
    high = int(np.searchsorted(below, 0.975))
    value_s = float(np.quantile(ordered, share))  # interpolated between two samples
    return Estimate(
        value_s=value_s,
        low_s=min(value_s, float(ordered[low - 1])) if low >= 1 else None,
        high_s=max(value_s, float(ordered[high])) if high < count else None,
    )


def _binomial(count: int, successes: int, share: float) -> float:
    ways = math.lgamma(count + 1) - math.lgamma(successes + 1) - math.lgamma(count - successes + 1)
    return math.exp(ways + successes * math.log(share) + (count - successes) * math.log1p(-share))
