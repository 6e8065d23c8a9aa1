"""The paper's figures 6 and 8 to 11, simulated: `python -m validate.figures` rewrites docs/results/figures.md.

Every number on the page is computed or read from a data file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np

import kvrsim
from kvrsim.arguments import SearchArgs
from kvrsim.attention_map import AttentionMap
from kvrsim.builder import make_scenario
from kvrsim.kernels.profile import SendStyle, load_profile
from kvrsim.noise import Distribution, parse_noise
from kvrsim.published import PublishedTtft, read_rows
from kvrsim.results.results import Plan, SimResult
from kvrsim.scenario import Scenario
from kvrsim.units import format_tokens
from planner.candidates import Search
from planner.simulate import run_simulation
from planner.table.table import PartitionTable
from planner.uncertainty.noise import Disturbance
from validate.published.compare import BANDWIDTH, DATA, scenario_of
from validate.published.fit import errors, partitions_for
from validate.report import RESULTS, fill, numbers_table, table, write_page

FAST = "300GB/s"  # the link of the figures, as the publication names it
PROFILE = "a100-eager"
GRID_DELTA = 512  # tokens between two first chunks of Fig. 6 (a): the paper's first stride
MODELS = ("llama-7b", "falcon-7b", "llama-7b-gqa8")  # models in the paper's figures, and one with grouped KV heads
SENDS: Mapping[SendStyle, str] = {
    "overlap": "overlap",
    "sender": "the sender waits until it has left",
    "rendezvous": "exclude each other",
}  # what a message does to computation
# What a message takes from computation: sends, and copies for its sender; None: as many as in the profile.
MESSAGES: Mapping[str, tuple[SendStyle, float | None]] = {
    "messages and computation exclude each other": ("rendezvous", 0.0),
    "they overlap, nothing is lost": ("overlap", 0.0),
    "they overlap, a message takes copies from its sender (the profile)": ("overlap", None),
}
MESSAGE_SAMPLES = 100  # noisy runs per case of that comparison
SLOW_CHUNKS = {"even": "even", "searched": "searched", "grid": "grid search, finest stride a 16th of the context"}
STRATEGIES = {"tsp": "TSP", "kvr-e": "KVR-E", "kvr-s": "KVR-S"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """The published rows, and the simulated cases."""

    rows: tuple[PublishedTtft, ...] = field(default_factory=read_rows)
    gpu_counts: tuple[int, ...] = (2, 4, 8)
    scaling_context_len: int = 16384  # tokens
    scaling_gpu_counts: tuple[int, ...] = (1, 2, 4, 8)
    model: str = "llama-7b"  # model for scalability and partitions
    entries: tuple[int, ...] = (4096, 8192, 12288, 16384)  # contexts of the lookup table, in tokens
    table_gpu_counts: tuple[int, ...] = (4, 8)
    noise_samples: int = 400  # runs per strategy

    @property
    def models(self) -> tuple[str, ...]:
        """The models of MODELS with published TTFTs over NVLink."""
        return tuple(model for model in MODELS if self.contexts(model))

    def printed_rows(self, model: str, num_gpus: int, strategy: str) -> dict[int, PublishedTtft]:
        """Return published rows over NVLink, by context."""
        columns = (model, num_gpus, strategy, FAST)
        rows = [row for row in self.rows if (row.model, row.num_gpus, row.strategy, row.link) == columns]
        return {row.context_len: row for row in sorted(rows, key=lambda row: row.context_len)}

    def contexts(self, model: str) -> list[int]:
        """Return the published contexts of a model over NVLink."""
        return sorted({row.context_len for row in self.rows if (row.model, row.link) == (model, FAST)})

    @property
    def halfway(self) -> list[int]:
        """Contexts halfway between two entries of the lookup table."""
        return [(low + high) // 2 for low, high in pairwise(self.entries)]


@cache
def simulate(model: str, context_len: int, num_gpus: int, strategy: str) -> SimResult:
    """Simulate a strategy over the profile's links with its own partition, which kvr-s searches for."""
    scenario = make_scenario(ctx=context_len, gpus=num_gpus, model=model, profile=PROFILE)[0]
    return run_simulation(scenario, strategy=strategy)


@cache
def simulate_row(row: PublishedTtft) -> SimResult:
    """Simulate a published row as the accuracy page does."""
    scenario, strategy = scenario_of(row)
    return run_simulation(scenario, strategy=strategy)


class Predictions:
    """The scope of the page, the printed figures, and predictions that several tables use."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.distributions: dict[tuple[int, int, str], Distribution] = {}  # noisy TTFTs by context, GPUs and strategy
        self.printed: dict[str, Any] = json.loads((DATA / "kv_runahead_icml2024_figures.json").read_text("utf-8"))

    @cached_property
    def plans(self) -> list[Plan]:
        """Plans with the paper's strategies and the bounds, one per number of GPUs."""
        scope = self.scope
        plans = []
        for count in scope.scaling_gpu_counts:
            plan = kvrsim.plan(
                gpus=count,
                strategies=["single", *STRATEGIES],
                ctx=scope.scaling_context_len,
                model=scope.model,
                profile=PROFILE,
            )
            plans.append(plan)
        return plans

    @cached_property
    def table(self) -> PartitionTable:
        """The lookup table of KVR-P."""
        scope = self.scope
        return kvrsim.build_table(gpus=scope.table_gpu_counts, ctx=scope.entries, model=scope.model, profile=PROFILE)

    def look_up(self, context_len: int, num_gpus: int) -> SimResult:
        """Simulate KVR-P."""
        return kvrsim.simulate(
            strategy="kvr-p", table=self.table, ctx=context_len, gpus=num_gpus, model=self.scope.model, profile=PROFILE
        )

    def noisy(self, context_len: int, num_gpus: int, strategy: str) -> Distribution:
        """Return noisy TTFTs of a strategy on the paper's network, with the partition for the network without noise."""
        case = (context_len, num_gpus, strategy)
        if case not in self.distributions:
            self.distributions[case] = self._simulate_noise(*case)
        return self.distributions[case]

    def _simulate_noise(self, context_len: int, num_gpus: int, strategy: str) -> Distribution:
        model = self.printed["noisy_network"]["model"]
        scenario = make_scenario(ctx=context_len, gpus=num_gpus, model=model, profile=PROFILE)[0]
        partition = simulate(model, context_len, num_gpus, strategy).partition
        return under_noise(scenario, strategy, partition, self.scope.noise_samples)


def under_noise(scenario: Scenario, strategy: str, partition: Sequence[int], num_samples: int) -> Distribution:
    """TTFTs of a partition on the paper's noisy network."""
    disturbance = Disturbance(noise=parse_noise("paper"), num_samples=num_samples)
    search = Search(partition=partition)
    noisy = run_simulation(scenario, strategy=strategy, search=search, disturbance=disturbance).noisy
    assert noisy is not None
    return noisy


def page(predictions: Predictions) -> list[str]:
    """Return the Markdown lines of the page."""
    scope = predictions.scope
    printed = predictions.printed
    noisy = printed["noisy_network"]
    pairs = [(row, simulate_row(row)) for row in scope.rows]
    limits = (f"{STRATEGIES[name]} {share:.1%}" for name, share in noisy["shares"].items())
    slow_ttfts, slow_nearest = _slow_ttfts(predictions)
    return fill(
        "figures",
        scope=scope,
        printed=printed,
        overview=_overview(predictions),
        messages=_messages(predictions),
        message_copies=load_profile(PROFILE).links.message_copies,
        message_times=_message_times(),
        within=sum(row.is_inside(one.ttft_low_s, one.ttft_high_s) for row, one in pairs),
        rows=len(scope.rows),
        case=f"{scope.model}, {format_tokens(scope.scaling_context_len)} tokens",
        speedups=_speedups(predictions),
        scalability=_scalability(predictions),
        partitions=_partitions(predictions),
        printed_partitions=_printed_partitions(predictions),
        slow_speedups=_slow_speedups(predictions),
        slow_caption=" and ".join(
            f"{slow_speedup(entry, 'switch') / entry['speedup'] - 1:+.0%}" for entry in printed["slow_speedups"][:2]
        ),
        slow_rows=sum(row.link == "1GB/s" and row.strategy == "kvr" for row in scope.rows),
        slow_ttfts=slow_ttfts,
        slow_nearest=slow_nearest,
        slow_two_gpus=_slow_two_gpus(predictions),
        memory_limit=f"{predictions.plans[0].memory_limit.nbytes / 2**30:.1f}",
        memory=_memory(predictions),
        grid_case=f"{scope.model}, {format_tokens(scope.scaling_context_len)} tokens on 2 GPUs",
        grid_printed=printed["partitions"][0]["printed_as"],
        grid=_grid(predictions),
        noisy_gains=_noisy_gains(predictions),
        entries=", ".join(map(format_tokens, scope.entries)),
        claims=" and ".join(f"{entry['share']:.1%}" for entry in printed["kvr_p_above_kvr_s"]),
        looked_up=_lookups(predictions),
        noise_parameters=parse_noise("paper").describe(),
        limits=", ".join(limits),
        increases=_increases(predictions),
    )


def _overview(predictions: Predictions) -> list[str]:
    """Return a line for each figure and table of the paper: what it prints, and the error here."""
    scope = predictions.scope
    printed = predictions.printed
    fast = [row for row in scope.rows if row.link == FAST]
    tables = {number: [row for row in scope.rows if row.table == number] for number in ("1", "2", "3")}
    llama = [row for row in fast if row.model == scope.model]
    falcon = [row for row in fast if row.model == "falcon-7b"]
    single = [row for row in tables["3"] if row.link == "none"]
    bus = {link: [row for row in tables["3"] if row.link == link] for link in BANDWIDTH}
    gathered = AttentionMap(chunks=(3, 3, 3), gathers=True)
    chained = AttentionMap(chunks=(4, 3, 2), gathers=False)
    counted = f"{max(gathered.dot_products)} and {max(chained.dot_products)} dot products, "
    counted += f"{gathered.kv_entries} and {chained.kv_entries} entries of K and V"
    largest = _largest_increases(predictions)
    noise = ", ".join(
        f"{STRATEGIES[name]} {share - printed['noisy_network']['shares'][name]:+.1%}" for name, share in largest.items()
    )
    slow = {
        topology: [slow_speedup(entry, topology) / entry["speedup"] - 1 for entry in printed["slow_speedups"]]
        for topology in ("bus", "switch")
    }
    slow_errors = "; ".join(f"{name} {min(off):+.0%} to {max(off):+.0%}" for name, off in slow.items())
    rows = [
        ("Figs. 1, 3, 7", "how inference, TSP and KV-Runahead work", "no number"),
        ("Fig. 2", "which part of the attention map is computed", "no number; `kvrsim simulate --explain` prints it"),
        ("Figs. 4, 5", "27 and 21 dot products, 36 and 22 entries of K and V", f"equal: {counted}"),
        (
            "Fig. 6 a",
            f"the search ends at {printed['partitions'][0]['printed_as']}",
            "[below](#two-gpus-one-boundary-fig-6-a)",
        ),
        ("Figs. 6 b-d", "the search of a boundary pair with 96 tokens", "no TTFT; `tests/planner/search/test_grid.py`"),
        ("Fig. 8 a", "TSP runs out of memory at 16k on 2 GPUs; no TTFT", "[fits here](#scalability-fig-8-d)"),
        ("Figs. 8 b, c", "TTFTs of Llama 7B (in the appendix)", _mean_error(llama)),
        ("Fig. 8 d", "TTFTs at 16k", _mean_error([row for row in llama if row.context_len == 16384])),
        ("Figs. 8 e, f", "speed-ups at 10 GB/s", slow_errors),
        ("Fig. 9", "TTFTs of Falcon 7B (in the appendix)", _mean_error(falcon)),
        ("Fig. 10 a", "chunks, as bars; two partitions in the text", "[below](#partitions-fig-10-a)"),
        ("Figs. 10 b, c", "KVR-P within 1.1 and 1.3 % of KVR-S", "[below](#looked-up-partitions-figs-10-b-c)"),
        ("Figs. 11 a, b", "gains on a noisy network", "[below](#a-noisy-network-fig-11)"),
        ("Fig. 11 c", "largest increases of TTFT", f"percentage points: {noise}"),
        ("Table of further networks", f"{len(tables['1'])} TTFTs", _mean_error(tables["1"])),
        ("Table of MQA and GQA", f"{len(tables['2'])} TTFTs", _mean_error(tables["2"])),
        ("Table of slow links", "TTFTs of one GPU", _mean_error(single)),
        ("the same at 10 GB/s", "TTFTs; a bus and searched chunks", _mean_error(bus["10GB/s"])),
        ("the same at 1 GB/s", "TTFTs; a bus and searched chunks", _mean_error(bus["1GB/s"])),
        (
            "Table of variants, pseudo-code, example of 11 tokens",
            "definitions",
            "no number; the example's counts are a test",
        ),
    ]
    return table(("figure or table", "prints", "error of the prediction"), rows)


def _mean_error(rows: Sequence[PublishedTtft]) -> str:
    """Mean, median and largest absolute error of published rows."""
    if not rows:
        return "no rows"
    sizes = np.abs([simulate_row(row).ttft_s / row.ttft_s - 1 for row in rows])
    return f"mean {sizes.mean():.1%}, median {np.median(sizes):.1%}, largest {sizes.max():.1%} of {len(rows)} TTFTs"


def _message_times() -> float:
    """What a message takes from its sender's computation, in multiples of the seconds of a long transfer."""
    profile = load_profile(PROFILE)
    bytes_per_byte = 2.0 * profile.links.message_copies  # each copy reads and writes
    return bytes_per_byte / profile.kernels.elementwise.copy * profile.links.bandwidth_bytes_per_s


def _messages(predictions: Predictions) -> list[str]:
    """Return errors and noise for each way in which messages and computation may share a GPU."""
    scope = predictions.scope
    noisy = predictions.printed["noisy_network"]
    rows = [row for row in scope.rows if row.used_for_calibration]
    shipped = load_profile(PROFILE)
    lines = []
    for name, (sends, copies) in MESSAGES.items():
        message_copies = shipped.links.message_copies if copies is None else copies
        links = replace(shipped.links, sends=sends, message_copies=message_copies)
        profile = replace(shipped, links=links)
        partitions = partitions_for(rows, profile)
        sizes = np.abs(np.expm1(errors(rows, profile, partitions)))
        most: dict[str, list[float]] = {"kvr-e": [], "kvr-s": []}
        for strategy, num_gpus in product(most, noisy["num_gpus"]):
            increases_ = []
            for tokens in noisy["context_lens"]:
                scenario = make_scenario(ctx=tokens, gpus=num_gpus, model=noisy["model"], profile=PROFILE)[0]
                scenario = replace(scenario, profile=profile)
                partition = run_simulation(scenario, strategy=strategy).partition
                ttft = under_noise(scenario, strategy, partition, min(MESSAGE_SAMPLES, scope.noise_samples))
                increases_.append(ttft.mean.value_s / ttft.quiet_s - 1)
            most[strategy].append(max(increases_))
        largest = (" and ".join(f"{share:.1%}" for share in shares) for shares in most.values())
        lines.append((name, f"{sizes.mean():.2%}", *largest))
    printed = (f"{noisy['shares'][name]:.1%}" for name in ("kvr-e", "kvr-s"))
    lines.append(("the paper, at most", "", *printed))
    return table(("messages", f"mean error of {len(rows)} TTFTs", "KVR-E under noise, 4 and 8 GPUs", "KVR-S"), lines)


def _speedups(predictions: Predictions) -> list[str]:
    """Return KVR-S's speedup over TSP, printed / predicted, by context; empty if a row is missing."""
    scope = predictions.scope
    rows = []
    contexts = sorted({tokens for model in scope.models for tokens in scope.contexts(model)})
    for model, num_gpus in product(scope.models, scope.gpu_counts):
        tsp, own = (scope.printed_rows(model, num_gpus, strategy) for strategy in ("tsp", "kvr-s"))
        cells = []
        for tokens in contexts:
            if tokens in tsp and tokens in own:
                predicted = simulate_row(tsp[tokens]).ttft_s / simulate_row(own[tokens]).ttft_s
                cells.append(f"{tsp[tokens].ttft_s / own[tokens].ttft_s:.2f} / {predicted:.2f}")
            else:
                cells.append("")
        if own:
            rows.append((f"{model}, {num_gpus} GPUs", *cells))
    return numbers_table(("", *map(format_tokens, contexts)), rows)


def series(plan: Plan) -> dict[str, float]:
    """Return a plan's TTFTs by strategy, then TTFT(p) and the closed form TTFT*(p)."""
    by_name = {result.strategy: result.ttft_s for result in plan.strategies}
    no_comm_s = plan.bounds.ttft_no_comm_s
    star_s = plan.bounds.ttft_star_s
    assert no_comm_s is not None
    assert star_s is not None
    return {name: by_name[name] for name in STRATEGIES} | {"TTFT(p)": no_comm_s, "TTFT*(p)": star_s}


def _scalability(predictions: Predictions) -> list[str]:
    rows = []
    for plan in predictions.plans:
        ttft_s = series(plan)
        fits = next(result.fits for result in plan.strategies if result.strategy == "kvr-s")
        above = ttft_s["kvr-s"] / ttft_s["TTFT(p)"] - 1
        printed = _paper_values(predictions, plan)
        cells = (f"{seconds:.3f}" for seconds in (*ttft_s.values(), plan.bounds.lower_bound_s or 0.0))
        paper = " / ".join(f"{printed[name]:g}" for name in ("tsp", "kvr-s") if name in printed)
        rows.append((f"{plan.num_gpus}{'' if fits else ' (does not fit)'}", *cells, f"{above:.1%}", paper))
    heads = (*STRATEGIES.values(), "TTFT(p)", "TTFT*(p)", "proven bound", "KVR-S above TTFT(p)")
    return numbers_table(("GPUs", *heads, "reported TSP / KVR-S"), rows)


def _memory(predictions: Predictions) -> list[str]:
    """Return the memory that the GPU with the most needs, by number of GPUs and strategy."""
    rows = []
    for plan in predictions.plans:
        most_bytes = {result.strategy: max(rank.total for rank in result.memory) for result in plan.strategies}
        rows.append((str(plan.num_gpus), *(f"{most_bytes[name] / 2**30:.1f}" for name in STRATEGIES)))
    return numbers_table(("GPUs", *STRATEGIES.values()), rows)


def _paper_values(predictions: Predictions, plan: Plan) -> dict[str, float]:
    """Return the TTFTs that the paper prints for a plan's case, by strategy."""
    rows = {name: predictions.scope.printed_rows(plan.model, plan.num_gpus, name) for name in STRATEGIES}
    return {name: own[plan.context_len].ttft_s for name, own in rows.items() if plan.context_len in own}


def _partitions(predictions: Predictions) -> list[str]:
    scope = predictions.scope
    rows = []
    for num_gpus, tokens in product(scope.gpu_counts, sorted({*scope.entries, *scope.halfway})):
        own, even = (simulate(scope.model, tokens, num_gpus, name) for name in ("kvr-s", "kvr-e"))
        above = f"{even.ttft_s / own.ttft_s - 1:.1%}"
        rows.append((f"{num_gpus} × {format_tokens(tokens)}", shares_text(own.partition), above))
    return numbers_table(("GPUs × context", "KVR-S", "KVR-E above KVR-S"), rows)


def _printed_partitions(predictions: Predictions) -> list[str]:
    lines = []
    for printed in predictions.printed["partitions"]:
        simulated = simulate(printed["model"], printed["context_len"], printed["num_gpus"], "kvr-s")
        case = f"{printed['num_gpus']} × {format_tokens(printed['context_len'])}, {printed['method']}"
        shares = shares_text(simulated.partition)
        lines.append(f"- {case}: {printed['printed_as']} ({printed['place']}); KVR-S here: {shares}.")
    return lines


@cache
def _slow_s(context_len: int, num_gpus: int, strategy: str, topology: str) -> float:
    """TTFT in seconds at 10 GB/s over a network."""
    link = {"topology": topology, "link_bandwidth": BANDWIDTH["10GB/s"], "link_latency": 10e-6}
    scenario, _ = make_scenario(ctx=context_len, gpus=num_gpus, profile=PROFILE, **link)
    return run_simulation(scenario, strategy=strategy).ttft_s


def simulate_slow(entry: Mapping[str, Any], strategy: str, topology: str) -> float:
    """TTFT in seconds of the case of a printed speedup at 10 GB/s, over a network."""
    return _slow_s(entry["context_len"], entry["num_gpus"], strategy, topology)


def slow_speedup(entry: Mapping[str, Any], topology: str) -> float:
    """Speed-up over TSP of the case of a printed speed-up at 10 GB/s, over a network."""
    return simulate_slow(entry, "tsp", topology) / simulate_slow(entry, entry["strategy"], topology)


def _slow_speedups(predictions: Predictions) -> list[str]:
    """Return the printed speedups over TSP at 10 GB/s beside those on a bus and on a switch."""
    rows = []
    for entry in predictions.printed["slow_speedups"]:
        cells = [f"{entry['speedup']:.2f}"]
        for topology in ("bus", "switch"):
            speedup = slow_speedup(entry, topology)
            cells.append(f"{speedup:.2f} ({speedup / entry['speedup'] - 1:+.0%})")
        case = f"{STRATEGIES[entry['strategy']]}, {entry['num_gpus']} × {format_tokens(entry['context_len'])}"
        rows.append((f"{case} ({entry['place']})", *cells))
    return numbers_table(("case", "printed", "bus", "switch"), rows)


def _slow_ttfts(predictions: Predictions) -> tuple[list[str], str]:
    """Return mean errors of KV-Runahead's printed TTFTs by network and chunks, and the line nearest at both rates."""
    rows = [row for row in predictions.scope.rows if row.link in BANDWIDTH and row.strategy == "kvr"]
    errors_by_line: dict[tuple[str, str, str], list[float]] = {}
    for topology in ("bus", "switch"):
        for sends, what in SENDS.items():
            for chunks, name in SLOW_CHUNKS.items():
                means = []
                for link in BANDWIDTH:
                    rel_errors = [_slow_error(row, topology, sends, chunks) for row in rows if row.link == link]
                    means.append(float(np.mean(np.abs(rel_errors))))
                errors_by_line[topology, what, name] = means
    nearest = min(errors_by_line, key=lambda line: sum(errors_by_line[line]))
    shares = " and ".join(f"{error:.1%}" for error in errors_by_line[nearest])
    lines = []
    for line, means in errors_by_line.items():
        lines.append((*line, *(f"{error:.1%}" for error in means)))
    heads = ("network", "a message and computation", "chunks", *BANDWIDTH)
    return numbers_table(heads, lines), f"{', '.join(nearest)}: {shares}"


def _slow_two_gpus(predictions: Predictions) -> list[str]:
    """Return errors of the printed TTFTs of 2 GPUs by rate and context; their one link is the same on each network."""
    rows = [row for row in predictions.scope.rows if row.link in BANDWIDTH and row.num_gpus == 2]
    cases = [f"{row.link}, {format_tokens(row.context_len)}" for row in rows]
    lines = []
    for sends, what in SENDS.items():
        rel_errors = [_slow_error(row, "bus", sends, "searched") for row in rows]
        lines.append((what, *(f"{error:+.0%}" for error in rel_errors)))
    return numbers_table(("a message and computation", *cases), lines)


def _slow_error(row: PublishedTtft, topology: str, sends: SendStyle, chunks: str) -> float:
    """Relative error of a printed TTFT, if messages overlap computation or block it, on a network of that topology."""
    link = {"topology": topology, "link_bandwidth": BANDWIDTH[row.link], "link_latency": 10e-6}
    scenario, _ = make_scenario(ctx=row.context_len, gpus=row.num_gpus, model=row.model, profile=row.profile, **link)
    assert scenario.profile is not None
    links = replace(scenario.profile.links, sends=sends, sends_over_bus=sends)
    scenario = replace(scenario, profile=replace(scenario.profile, links=links))
    search = Search()
    if chunks == "grid":
        search = Search(options=SearchArgs(method="grid", stride=row.context_len // 16))
    strategy = "kvr-e" if chunks == "even" else "kvr-s"
    return run_simulation(scenario, strategy=strategy, search=search).ttft_s / row.ttft_s - 1


def _grid(predictions: Predictions) -> list[str]:
    """Return the TTFTs of six first chunks, and of that at which the paper's search ends."""
    scope = predictions.scope
    tokens = scope.scaling_context_len
    even = tokens // 2
    printed = round(predictions.printed["partitions"][0]["shares"][0] * tokens)
    scenario, _ = make_scenario(ctx=tokens, gpus=2, model=scope.model, profile=PROFILE)
    ttft_by_delta = {}
    for delta in sorted({*range(0, GRID_DELTA * 6, GRID_DELTA), printed - even}):
        search = Search(partition=(even + delta, even - delta))
        ttft_by_delta[delta] = run_simulation(scenario, strategy="kvr-s", search=search).ttft_s
    least = min(ttft_by_delta, key=ttft_by_delta.__getitem__)
    cells = [f"{seconds:.3f}{' (least)' * (delta == least)}" for delta, seconds in ttft_by_delta.items()]
    return numbers_table(("delta", *map(str, ttft_by_delta)), [("TTFT", *cells)])


def _noisy_gains(predictions: Predictions) -> list[str]:
    """Return the largest gains of KVR-S over TSP without and with noise, printed and predicted."""
    noisy = predictions.printed["noisy_network"]
    rows = []
    for entry in predictions.printed["noisy_speedups"]:
        num_gpus = entry["num_gpus"]
        quiet = []
        under_noise = []
        for tokens in noisy["context_lens"]:
            tsp, kvr = (predictions.noisy(tokens, num_gpus, name) for name in ("tsp", "kvr-s"))
            quiet.append(tsp.quiet_s / kvr.quiet_s - 1)
            under_noise.append(tsp.mean.value_s / kvr.mean.value_s - 1)
        cells = (f"{entry['quiet']:.1%}", f"{max(quiet):.1%}", f"{entry['noisy']:.1%}", f"{max(under_noise):.1%}")
        rows.append((str(num_gpus), *cells))
    return numbers_table(("GPUs", "quiet, printed", "predicted", "noisy, printed", "predicted"), rows)


def _lookups(predictions: Predictions) -> list[str]:
    scope = predictions.scope
    rows = []
    for num_gpus, tokens in product(scope.table_gpu_counts, scope.halfway):
        result = predictions.look_up(tokens, num_gpus)
        own, tsp = (simulate(scope.model, tokens, num_gpus, name) for name in ("kvr-s", "tsp"))
        rows.append(
            (
                f"{num_gpus} × {format_tokens(tokens)}",
                shares_text(result.partition),
                shares_text(own.partition),
                f"{result.ttft_s / own.ttft_s - 1:+.2%}",
                f"{tsp.ttft_s / own.ttft_s - 1:.1%}",
            )
        )
    return numbers_table(("GPUs × context", "KVR-P", "KVR-S", "KVR-P above KVR-S", "TSP above KVR-S"), rows)


def shares_text(partition: Sequence[int]) -> str:
    """Format the shares of a partition as the paper does: .350 .255 .210 .185."""
    return " ".join(f"{chunk / sum(partition):.3f}".removeprefix("0") for chunk in partition)


def increases(predictions: Predictions) -> dict[tuple[int, int], dict[str, tuple[float, float, float]]]:
    """Return mean noisy TTFT / TTFT without noise - 1 and its 95 % limits, by GPUs and context, then by strategy."""
    noisy = predictions.printed["noisy_network"]
    by_point: dict[tuple[int, int], dict[str, tuple[float, float, float]]] = {}
    for num_gpus, tokens, strategy in product(noisy["num_gpus"], noisy["context_lens"], STRATEGIES):
        ttft = predictions.noisy(tokens, num_gpus, strategy)
        mean = ttft.mean
        limits_s = (mean.value_s, mean.low_s or mean.value_s, mean.high_s or mean.value_s)
        mean_low_high = tuple(seconds / ttft.quiet_s - 1 for seconds in limits_s)
        by_point.setdefault((num_gpus, tokens), {})[strategy] = mean_low_high  # type: ignore[assignment]
    return by_point


def _largest_increases(predictions: Predictions) -> dict[str, float]:
    """Return the largest increase on each number of GPUs, averaged over the numbers of GPUs, by strategy."""
    largest: dict[str, dict[int, float]] = {name: {} for name in STRATEGIES}
    for (num_gpus, _), by_strategy in increases(predictions).items():
        for name, (mean, _, _) in by_strategy.items():
            largest[name][num_gpus] = max(mean, largest[name].get(num_gpus, 0.0))
    return {name: float(np.mean(list(by_gpus.values()))) for name, by_gpus in largest.items()}


def _increases(predictions: Predictions) -> list[str]:
    every = increases(predictions)
    most = predictions.printed["noisy_network"]["shares"]
    rows = [
        (f"{num_gpus}, {format_tokens(tokens)}", *("{:.1%} ({:.1%} to {:.1%})".format(*one) for one in own.values()))
        for (num_gpus, tokens), own in every.items()
    ]
    rows.append(("mean", *(f"{np.mean([own[name][0] for own in every.values()]):.1%}" for name in STRATEGIES)))
    largest = _largest_increases(predictions)
    rows.append(("mean of the largest on 4 and on 8 GPUs", *(f"{largest[name]:.1%}" for name in STRATEGIES)))
    rows.append(("the paper, at most", *(f"{most[name]:.1%}" for name in STRATEGIES)))
    return numbers_table(("GPUs, tokens", *STRATEGIES.values()), rows)


if __name__ == "__main__":
    write_page(RESULTS / "figures.md", page(Predictions(Scope())))
