"""What the paper says about orders, and its bold cells, checked: `python -m validate.claims` rewrites its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

from kvrsim.builder import make_scenario
from kvrsim.published import PublishedTtft
from kvrsim.units import format_tokens
from planner.simulate import run_simulation
from validate.figures import (
    FAST,
    PROFILE,
    STRATEGIES,
    Predictions,
    Scope,
    increases,
    series,
    simulate,
    simulate_row,
    slow_speedup,
)
from validate.published.compare import BANDWIDTH
from validate.report import RESULTS, fill, table, write_page

CANCELLED = 1.02  # a smaller speed-up counts as no benefit
NETWORKS = ("bus", "switch")  # topologies of the rows on slow links, whose chunks are searched

Cases = Iterator[tuple[str, bool]]  # a case, and whether the prediction agrees with the paper


class SlowLinkCell(NamedTuple):
    """A cell of the paper's table of slow links."""

    row: PublishedTtft
    single: PublishedTtft  # one GPU with the same context

    @property
    def is_tie(self) -> bool:
        """Whether the printed digits cannot say which of the two is faster."""
        return self.row.ttft_s == self.single.ttft_s

    @property
    def is_bold(self) -> bool:
        """Whether several GPUs are faster than one."""
        return self.row.ttft_s < self.single.ttft_s

    @property
    def case(self) -> str:
        """The cell in words."""
        return f"{self.row.link}, {format_tokens(self.row.context_len)} on {self.row.num_gpus}"


def ttft_s(model: str, context_len: int, num_gpus: int, strategy: str) -> float:
    """Predicted TTFT over NVLink, in seconds."""
    return simulate(model, context_len, num_gpus, strategy).ttft_s


def case_of(model: str, num_gpus: int, context_len: int) -> str:
    """A case in words."""
    return f"{model}, {num_gpus} × {format_tokens(context_len)}"


@cache
def slow_s(row: PublishedTtft, network: str) -> float:
    """Predicted TTFT of a row of slow links on one of NETWORKS, in seconds."""
    link = {"topology": network, "link_bandwidth": BANDWIDTH[row.link], "link_latency": 10e-6}
    scenario, _ = make_scenario(ctx=row.context_len, gpus=row.num_gpus, model=row.model, profile=row.profile, **link)
    return run_simulation(scenario, strategy="kvr-s").ttft_s


class PaperClaims:
    """The cases of each claim; a method per claim, with the claim's key in the data as its name."""

    def __init__(self, predictions: Predictions) -> None:
        self.predictions = predictions
        self.scope = predictions.scope

    def kvr_s_beats_tsp(self) -> Cases:
        """All printed pairs."""
        for tsp, kvr in self.pairs():
            yield tsp.case.replace(" tsp", ""), simulate_row(kvr).ttft_s < simulate_row(tsp).ttft_s

    def kvr_e_beats_tsp(self) -> Cases:
        """All cases of Fig. 8 (a-c), without the one in which the paper's TSP ran out of memory."""
        model = self.scope.model
        for num_gpus, tokens in product(self.scope.gpu_counts, self.scope.entries):
            if (num_gpus, tokens) != (2, 16384):
                is_faster = ttft_s(model, tokens, num_gpus, "kvr-e") < ttft_s(model, tokens, num_gpus, "tsp")
                yield case_of(model, num_gpus, tokens), is_faster

    def falcon_4k(self) -> Cases:
        """KVR-E gains less than CANCELLED."""
        for num_gpus in self.scope.table_gpu_counts:
            gain = ttft_s("falcon-7b", 4096, num_gpus, "tsp") / ttft_s("falcon-7b", 4096, num_gpus, "kvr-e")
            yield f"{case_of('falcon-7b', num_gpus, 4096)} ({gain:.3f})", gain < CANCELLED

    def falcon_8k(self) -> Cases:
        """KVR-E is faster than TSP."""
        for num_gpus in self.scope.table_gpu_counts:
            gain = ttft_s("falcon-7b", 8192, num_gpus, "tsp") / ttft_s("falcon-7b", 8192, num_gpus, "kvr-e")
            yield f"{case_of('falcon-7b', num_gpus, 8192)} ({gain:.3f})", gain > 1.0

    def longer_gains_more(self) -> Cases:
        """The speed-up at a model's longest context is above that at its shortest."""
        gains: dict[tuple[str, int], dict[int, float]] = {}
        for tsp, kvr in self.pairs():
            gain = simulate_row(tsp).ttft_s / simulate_row(kvr).ttft_s
            gains.setdefault((tsp.model, tsp.num_gpus), {})[tsp.context_len] = gain
        for (model, num_gpus), by_context in gains.items():
            yield f"{model}, {num_gpus} GPUs", by_context[max(by_context)] > by_context[min(by_context)]

    def over_40(self) -> Cases:
        """The speed-up at the longest context."""
        model = self.scope.model
        tokens = self.scope.scaling_context_len
        for num_gpus in self.scope.table_gpu_counts:
            gain = ttft_s(model, tokens, num_gpus, "tsp") / ttft_s(model, tokens, num_gpus, "kvr-s")
            yield f"{case_of(model, num_gpus, tokens)} ({gain:.2f})", gain > 1.4

    def slower_gains_more(self) -> Cases:
        """The two speed-ups of the caption of Fig. 8, on a bus and on a switch."""
        for entry in self.predictions.printed["slow_speedups"][:2]:
            case = (self.scope.model, entry["context_len"], entry["num_gpus"])
            fast = ttft_s(*case, "tsp") / ttft_s(*case, entry["strategy"])
            for topology in ("bus", "switch"):
                slow = slow_speedup(entry, topology)
                name = f"{STRATEGIES[entry['strategy']]}, {entry['num_gpus']} × {format_tokens(entry['context_len'])}"
                yield f"{name} on a {topology} ({fast:.2f}, {slow:.2f})", slow > fast

    def bounds(self) -> Cases:
        """The order of the five lines of Fig. 8 (d)."""
        for plan in self.predictions.plans:
            if plan.num_gpus > 1:
                falls = all(slower > faster for slower, faster in pairwise(series(plan).values()))
                yield f"{plan.num_gpus} GPUs", falls

    def memory(self) -> Cases:
        """Peak of the GPU that needs the most."""
        for plan in self.predictions.plans:
            if plan.num_gpus > 1:
                needs = {one.strategy: max(rank.total for rank in one.memory) for one in plan.strategies}
                yield f"{plan.num_gpus} GPUs", needs["tsp"] > needs["kvr-s"]

    def out_of_memory(self) -> Cases:
        """Whether TSP exceeds the memory of two GPUs."""
        for plan in self.predictions.plans:
            if plan.num_gpus == 2:
                tsp = next(one for one in plan.strategies if one.strategy == "tsp")
                most = max(rank.total for rank in tsp.memory)
                limit = plan.memory_limit.nbytes
                yield f"{most / 2**30:.1f} of {limit / 2**30:.1f} GiB", not tsp.fits

    def earlier_more(self) -> Cases:
        """Each searched chunk is at least as long as the next one."""
        model = self.scope.model
        for num_gpus, tokens in product(self.scope.gpu_counts, self.scope.entries):
            partition = simulate(model, tokens, num_gpus, "kvr-s").partition
            yield case_of(model, num_gpus, tokens), all(first >= then for first, then in pairwise(partition))

    def kvr_p(self) -> Cases:
        """Looked-up partitions halfway between two entries."""
        limit = max(entry["share"] for entry in self.predictions.printed["kvr_p_above_kvr_s"])
        model = self.scope.model
        for num_gpus, tokens in product(self.scope.table_gpu_counts, self.scope.halfway):
            looked_up_s = self.predictions.look_up(tokens, num_gpus).ttft_s
            near = looked_up_s <= (1 + limit) * ttft_s(model, tokens, num_gpus, "kvr-s")
            yield case_of(model, num_gpus, tokens), near and looked_up_s < ttft_s(model, tokens, num_gpus, "tsp")

    def noise_order(self) -> Cases:
        """Mean increases of TTFT."""
        for (num_gpus, tokens), by_strategy in increases(self.predictions).items():
            means = {name: mean for name, (mean, _, _) in by_strategy.items()}
            ordered = means["tsp"] > means["kvr-s"] > means["kvr-e"]
            yield case_of(self.scope.model, num_gpus, tokens), ordered

    def noise_margin(self) -> Cases:
        """Mean TTFTs under noise, against those without."""
        noisy = self.predictions.printed["noisy_network"]
        for num_gpus, tokens in product(noisy["num_gpus"], noisy["context_lens"]):
            tsp, kvr = (self.predictions.noisy(tokens, num_gpus, name) for name in ("tsp", "kvr-s"))
            is_wider = tsp.mean.value_s / kvr.mean.value_s > tsp.quiet_s / kvr.quiet_s
            yield case_of(self.scope.model, num_gpus, tokens), is_wider

    def variants(self) -> Cases:
        """Every TTFT of a variant that is printed below that of the model with all KV heads; many are not."""
        full = {
            (row.context_len, row.num_gpus, row.strategy): row
            for row in self.rows_at(FAST)
            if row.model == self.scope.model
        }
        for row in self.scope.rows:
            if row.table == "2":
                other = full[row.context_len, row.num_gpus, row.strategy]
                if row.ttft_s < other.ttft_s:
                    name = f"{row.model}, {STRATEGIES[row.strategy]}, {row.num_gpus} × {format_tokens(row.context_len)}"
                    yield name, simulate_row(row).ttft_s < simulate_row(other).ttft_s

    def variants_gain(self) -> Cases:
        """The order of three speed-ups."""
        gains = []
        for model in (self.scope.model, "llama-7b-gqa8", "llama-7b-mqa"):
            gains.append(ttft_s(model, 16384, 8, "tsp") / ttft_s(model, 16384, 8, "kvr-s"))
        yield ", ".join(f"{gain:.3f}" for gain in gains), gains == sorted(gains)

    def four_slower(self) -> Cases:
        """Pairs of cells on slow links in which the paper's 4 GPUs are slower than its 2."""
        yield from self.four_against_two(lambda two, four: four > two)

    def four_faster(self) -> Cases:
        """Pairs of cells on slow links in which the paper's 4 GPUs are faster than its 2."""
        yield from self.four_against_two(lambda two, four: four < two)

    def four_against_two(self, agrees: Callable[[float, float], bool]) -> Cases:
        """Pairs of cells whose printed TTFTs agree with a relation, and whether the predicted ones do."""
        by_case = {(cell.row.link, cell.row.context_len, cell.row.num_gpus): cell.row for cell in self.cells()}
        for (link, tokens, num_gpus), two in by_case.items():
            if num_gpus == 2 and agrees(two.ttft_s, by_case[link, tokens, 4].ttft_s):
                for network in NETWORKS:
                    predicted = (slow_s(two, network), slow_s(by_case[link, tokens, 4], network))
                    yield f"{link}, {format_tokens(tokens)} ({network})", agrees(*predicted)

    def pairs(self) -> Iterator[tuple[PublishedTtft, PublishedTtft]]:
        """The printed rows of TSP and of KVR-S over NVLink, by case."""
        rows = {(row.model, row.context_len, row.num_gpus, row.strategy): row for row in self.rows_at(FAST)}
        for (model, tokens, num_gpus, strategy), row in rows.items():
            if strategy == "tsp":
                yield row, rows[model, tokens, num_gpus, "kvr-s"]

    def cells(self) -> Iterator[SlowLinkCell]:
        """The cells of the table of slow links."""
        singles = {row.context_len: row for row in self.scope.rows if row.num_gpus == 1}
        for link in BANDWIDTH:
            for row in self.rows_at(link):
                yield SlowLinkCell(row, singles[row.context_len])

    def rows_at(self, link: str) -> list[PublishedTtft]:
        """The published rows of several GPUs over a link."""
        return [row for row in self.scope.rows if row.link == link]


def check_all(claims: PaperClaims) -> dict[str, dict[str, bool]]:
    """Whether each case of each claim agrees, by key and case."""
    return {key: dict(getattr(claims, key)()) for key in claims.predictions.printed["order_claims"]}


def page(predictions: Predictions) -> list[str]:
    """Return the Markdown lines of the page."""
    claims = PaperClaims(predictions)
    answers = check_all(claims)
    cells = [cell for cell in claims.cells() if not cell.is_tie]
    return fill(
        "claims",
        profile=PROFILE,
        right=sum(all(cases.values()) for cases in answers.values()),
        claims=len(answers),
        orders=_orders(predictions.printed["order_claims"], answers),
        captions=_captions(predictions),
        num_bold=sum(cell.is_bold for cell in cells),
        num_plain=sum(not cell.is_bold for cell in cells),
        ties=", ".join(cell.case for cell in claims.cells() if cell.is_tie),
        bold=_bold(cells),
    )


def _orders(printed: Mapping[str, Mapping[str, str]], answers: Mapping[str, Mapping[str, bool]]) -> list[str]:
    rows = []
    for key, cases in answers.items():
        wrong = [case for case, agrees in cases.items() if not agrees]
        where = f"{printed[key]['claim']} ({printed[key]['place']})"
        rows.append((where, f"{len(cases) - len(wrong)} of {len(cases)}", "; ".join(wrong)))
    return table(("claim", "right", "wrong"), rows)


def _captions(predictions: Predictions) -> list[str]:
    """Speed-ups over TSP that captions print, beside those predicted."""
    rows = []
    for entry in predictions.printed["captions"]:
        case = (entry["model"], entry["context_len"], entry["num_gpus"])
        predicted = ttft_s(*case, "tsp") / ttft_s(*case, "kvr-s")
        name = case_of(entry["model"], entry["num_gpus"], entry["context_len"])
        error = f"{predicted / entry['speedup'] - 1:+.1%}"
        rows.append((entry["place"], name, f"{entry['speedup']:.2f}", f"{predicted:.2f}", error))
    return table(("place", "case", "printed", "predicted", "error"), rows)


def _bold(cells: list[SlowLinkCell]) -> list[str]:
    """For each network: how many bold and plain cells are right, and which are wrong."""
    rows = []
    for network in NETWORKS:
        wrong = []
        for cell in cells:
            if (slow_s(cell.row, network) < simulate_row(cell.single).ttft_s) != cell.is_bold:
                wrong.append(cell)
        bold_wrong = sum(cell.is_bold for cell in wrong)
        num_bold = sum(cell.is_bold for cell in cells)
        num_plain = len(cells) - num_bold
        right = (f"{num_bold - bold_wrong} of {num_bold}", f"{num_plain - len(wrong) + bold_wrong} of {num_plain}")
        rows.append((network, *right, "; ".join(cell.case for cell in wrong)))
    return table(("network", "bold, right", "not bold, right", "wrong"), rows)


def main() -> None:
    """Write the page."""
    write_page(RESULTS / "claims.md", page(Predictions(Scope())))


if __name__ == "__main__":
    main()
