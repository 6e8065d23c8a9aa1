"""What the stages of a pipeline do with each piece of the context, all pieces and partitions in one array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from kvrsim.ends import embedding, last, request
from kvrsim.ends import step as before_step
from kvrsim.kernels.calibrated import CostModel
from kvrsim.program import AllGather, Array, Collective, Compute, Op
from kvrsim.scenario import Scenario
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.layers import layer_ops, prefix_load
from kvrsim.strategies.pipeline import context_ranks, shares, stages


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Computes in a row: `t' = max(t + device_s, host_begin + floor_s)`."""

    device_s: Array
    floor_s: Array
    host_s: float

    @classmethod
    def of(cls, ops: Iterable[Op]) -> _Stretch:
        """Computes and collectives, one after another."""
        found = cls(np.zeros(1), np.full(1, -np.inf), 0.0)
        for op in ops:
            assert isinstance(op, Compute | Collective)
            device_s = op.device_s if isinstance(op, Compute) else op.seconds
            found = found.then(cls(device_s, np.maximum(device_s, op.host_s), op.host_s))
        return found

    def then(self, other: _Stretch) -> _Stretch:
        """With another one behind it."""
        floor_s = np.maximum(self.floor_s + other.device_s, self.host_s + other.floor_s)
        return _Stretch(self.device_s + other.device_s, floor_s, self.host_s + other.host_s)

    def times(self, count: int) -> _Stretch:
        """So often behind itself."""
        longer_s = (count - 1) * np.maximum(self.device_s, self.host_s)
        return _Stretch(count * self.device_s, self.floor_s + longer_s, count * self.host_s)


@dataclass(frozen=True, slots=True)
class Stretches:
    """Stretches of all pieces, kinds and context ranks; arrays (M, kinds, context ranks, B)."""

    device_s: Array
    floor_s: Array
    host_s: Array  # shape (kinds,)

    @classmethod
    def of(cls, kinds: Sequence[Sequence[_Stretch]], shape: tuple[int, int]) -> Stretches:
        """By kind, by context rank; shape: pieces, and partitions."""

        def together(values: Sequence[Sequence[Array]]) -> Array:
            rows = [np.stack([np.broadcast_to(one, shape) for one in ranks], axis=1) for ranks in values]
            return np.stack(rows, axis=1)

        return cls(
            together([[one.device_s for one in ranks] for ranks in kinds]),
            together([[one.floor_s for one in ranks] for ranks in kinds]),
            np.array([ranks[0].host_s for ranks in kinds]),
        )


@dataclass(frozen=True, slots=True)
class StageWork:
    """What the stages do with each piece: what comes before the layers, then stretches with all-gathers between."""

    lengths: Array  # tokens, shape (M, B)
    layers: tuple[tuple[int, ...], ...]  # by stage: the kind of each stretch
    begins: Stretches  # two kinds: of the first stage, and of the others
    before: Stretches  # by kind of layer, up to the all-gather; without context ranks, all of a stage's layers
    after: Stretches | None  # from the all-gather on; None: there is none
    gathers: Sequence[Sequence[AllGather]]  # by kind of layer, by context rank
    sent_bytes: Array  # of the activations, shape (M, context ranks, B)
    prologue: _Stretch
    epilogue: _Stretch

    @classmethod
    def of(cls, scenario: Scenario, strategy: Strategy, lengths: Array, cost: CostModel) -> StageWork | None:
        """As pipeline.program has it; None where layers are not alike in what they wait for."""
        kinds = scenario.share.layer_kind_index
        held, context = stages(strategy, len(kinds), scenario.cluster.num_gpus), range(context_ranks(strategy))
        before = scenario.request.cached_prefix + np.cumsum(lengths, axis=0) - lengths
        chunks = shares(lengths, len(context))
        starts = list(accumulate(chunks[:-1], initial=before))
        steps = [Step(costs, chunks, starts) for costs in scenario.layer_costs(cost)]
        if any(prefix_load(strategy, one, rank) is not None for one in steps for rank in context):
            return None
        ops = [[tuple(layer_ops(strategy, one, rank)) for rank in context] for one in steps]
        numbers = {tuple(isinstance(op, AllGather) for op in own).count(True) for ranks in ops for own in ranks}
        if len(numbers) > 1 or max(numbers) != (len(context) > 1):
            return None
        layers = tuple(tuple(kinds[layer] for layer in rows) for rows in held)
        split = [[_split(own) for own in ranks] for ranks in ops]
        prepared = [before_step(scenario, chunk, before + lengths, cost) for chunk in chunks]
        embedded = [(*embedding(scenario, chunk, cost), *own) for chunk, own in zip(chunks, prepared, strict=True)]
        shape, after = (len(lengths), lengths.shape[1]), None
        firsts = [[first for first, _, _ in ranks] for ranks in split]
        if len(context) > 1:
            after = Stretches.of([[behind for _, _, behind in ranks] for ranks in split], shape)
        else:
            patterns = {pattern: number for number, pattern in enumerate(dict.fromkeys(layers))}
            firsts = [[_in_a_row(pattern, firsts)] for pattern in patterns]
            layers = tuple((patterns[pattern],) for pattern in layers)
        return cls(
            lengths=lengths,
            layers=layers,
            begins=Stretches.of([list(map(_Stretch.of, embedded)), list(map(_Stretch.of, prepared))], shape),
            before=Stretches.of(firsts, shape),
            after=after,
            gathers=[[gather for _, gather, _ in ranks if gather is not None] for ranks in split],
            sent_bytes=np.stack([steps[0].costs.activation_bytes(chunk) for chunk in chunks], axis=1),
            prologue=_Stretch.of(request(scenario, lengths[0])),
            epilogue=_Stretch.of(last(scenario, chunks[-1][-1], before[-1] + lengths[-1], cost)),
        )


def _split(ops: Sequence[Op]) -> tuple[_Stretch, AllGather | None, _Stretch]:
    """What a context rank does before its all-gather, the all-gather, and what it does after it."""
    places = [place for place, op in enumerate(ops) if isinstance(op, AllGather)]
    if not places:
        return _Stretch.of(ops), None, _Stretch.of(())
    gather = ops[places[0]]
    assert isinstance(gather, AllGather)
    return _Stretch.of(ops[: places[0]]), gather, _Stretch.of(ops[places[0] + 1 :])


def _in_a_row(pattern: Sequence[int], kinds: Sequence[Sequence[_Stretch]]) -> _Stretch:
    """Layers of these kinds on one rank."""
    found = _Stretch.of(())
    for kind, rows in groupby(pattern):
        found = found.then(kinds[kind][0].times(len(list(rows))))
    return found
