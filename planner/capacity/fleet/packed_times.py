"""PackedTimes: what groups take for the prompts of a workload where they pack them into steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvrsim.compile import for_strategy
from kvrsim.program import Array
from kvrsim.scenario import Request, Scenario
from planner.capacity.fleet.decoding import Decoding
from planner.capacity.fleet.layouts import WHOLE, Choice, Kind
from planner.capacity.fleet.service import Overlap, Service
from planner.capacity.fleet.times import ServiceTimes
from planner.capacity.workloads.workload import Lengths, Workload
from planner.packing.memory import most_held
from planner.packing.prices import Packing, StepPrices
from planner.packing.rule import check_packs
from planner.processes import Pool


class PackedTimes(ServiceTimes):
    """Times of packed steps of at most `pack_tokens` new tokens, at the clock of the longest prompt."""

    def __init__(
        self, scenario: Scenario, longest_new: int, longest_prefix: int, choice: Choice, pack_tokens: int
    ) -> None:
        super().__init__(scenario, longest_new, longest_prefix, choice)
        self.longest_new, self.longest = longest_new, longest_new + longest_prefix
        self.pack_tokens = pack_tokens
        self._packings: dict[Kind, tuple[str, Packing]] = {}

    def kinds(self, num_gpus: int) -> tuple[Kind, ...]:
        """Groups of that size in whose memory some prompt fits or, where none does in any, the last kind."""
        kinds = [Kind(num_gpus, weights) for weights in self.choice.layouts(self.scenario.on_gpus(num_gpus))]
        return tuple(kind for kind in kinds if self.packing(kind)[1].most_held) or tuple(kinds[-1:])

    def fill(self, sizes: Sequence[int], pool: Pool) -> None:
        """Nothing: steps are priced as the queue forms them, each once, in this process."""

    def packing(self, kind: Kind) -> tuple[str, Packing]:
        """The strategy of such groups, and what its steps take."""
        if kind not in self._packings:
            request = Request(context_len=self.longest_new, dtype=self.scenario.request.dtype)
            asked = replace(self.scenario.on_gpus(kind.gpus), request=request)
            strategy = self.choice.layouts(asked)[kind.weights][0]
            placed = for_strategy(asked, strategy)
            check_packs(placed, strategy, "strategies")
            prices = StepPrices(placed, strategy, self.pack_tokens, self.longest)
            held = most_held(placed, strategy, self.pack_tokens, max(self.longest, self.pack_tokens))
            self._packings[kind] = strategy.name, Packing(prices=prices, most_held=held)
        return self._packings[kind]

    def seconds(self, num_gpus: int, new_tokens: Lengths, cached_prefix: Lengths, weights: str = WHOLE) -> Array:
        """TTFT alone on a group; inf where the context does not fit in its memory."""
        packing = self.packing(Kind(num_gpus, weights))[1]
        seconds = _of_each(packing.prices.alone_s, new_tokens, cached_prefix)
        return np.where(new_tokens + cached_prefix <= packing.most_held, seconds, np.inf)

    def service(
        self, num_gpus: int, workload: Workload, decoding: Decoding | None = None, weights: str = WHOLE
    ) -> Service:
        """Service times of a workload on such groups."""
        decoding = decoding or Decoding()
        name, packing = self.packing(Kind(num_gpus, weights))
        new, prefix = workload.new_tokens, workload.cached_prefix
        ttft_s = self.seconds(num_gpus, new, prefix, weights)
        hold_s = decoding.hold_s(workload.output_tokens)
        if decoding.transfer is not None:
            hold_s = decoding.transfer.after_s(workload.context_len, ttft_s, np.full(len(new), num_gpus))
        return Service(
            num_gpus=num_gpus,
            ttft_s=ttft_s,
            hold_s=hold_s,
            hold_gpus=0 if decoding.seconds_per_token is None else 1,
            length_class=np.zeros(len(new), dtype=np.int64),
            strategies=(name,),
            overlap=Overlap.whole(),
            new_tokens=new,
            cached_prefix=prefix,
            packing=packing,
            least_s=_of_each(packing.prices.least_s, new, prefix),
        )


def _of_each(seconds: Callable[[int, int], float], new_tokens: Lengths, cached_prefix: Lengths) -> Array:
    """Of each prompt; those alike are computed once."""
    pairs, places = np.unique(np.stack([new_tokens, cached_prefix]), axis=1, return_inverse=True)
    each = [seconds(new, prefix) for new, prefix in zip(*pairs.tolist(), strict=True)]
    return np.array(each)[places.reshape(-1)]
