"""Pipelines: each rank is a stage with some of the layers, through which the context goes piece by piece."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvrsim.errors import InputError
from kvrsim.runtime.exchange import Exchange
from kvrsim.runtime.geometry import KvLayout
from kvrsim.runtime.kv_cache import Chunk, KvPairs, Memory, PrefixCache, UpdateEvent, allocate, make_buffers
from kvrsim.runtime.model import ModelForward, light_copy

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry
    from kvrsim.runtime.plan import RunPlan
    from kvrsim.runtime.transport import Pending, Transport


class StageForward(ModelForward):
    """The layers of one stage; the first stage has the embedding, the last stage the final norm and the head.

    Its layers count from 0, in the model, its geometry and its cache.
    """

    def __init__(self, whole: ModelForward, layers: range) -> None:
        """`layers` are the numbers of the stage's layers in the whole model.

        Raises InputError for a stage without attention layers, because transformers counts tokens by their K and V.
        """
        self.layers = layers
        self.is_first, self.is_final = layers.start == 0, layers.stop == whole.geometry.num_hidden_layers
        model = light_copy(whole.model)
        self._cut(model, whole.geometry)
        layouts = whole.geometry.layouts[layers.start : layers.stop]
        if not any(isinstance(layout, KvLayout) for layout in layouts):
            text = f"layers {layers.start} to {layers.stop - 1}"
            raise InputError("layers", text, "a layer with attention in every stage, which counts the tokens")
        super().__init__(model, replace(whole.geometry, layouts=layouts))

    def _cut(self, model: Any, geometry: Geometry) -> None:
        """Leave only the stage's layers in a copy of the model and in its configuration."""
        base, config, first, stop = model.base_model, model.config, self.layers.start, self.layers.stop
        own = getattr(base, geometry.family.layers)[first:stop]
        setattr(base, geometry.family.layers, own)
        for module in own.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx -= first
        config.num_hidden_layers = len(self.layers)
        for key, value in list(vars(config).items()):
            if "layer" in key and isinstance(value, list) and len(value) == geometry.num_hidden_layers:
                setattr(config, key, value[first:stop])
        if not self.is_final:
            setattr(base, geometry.family.norm, torch.nn.Identity())
            model.set_output_embeddings(torch.nn.Identity())
        if not self.is_first:
            model.set_input_embeddings(torch.nn.Identity())


class Pipeline(Exchange):
    """Pipeline: a piece attends to its stage's K and V of earlier pieces; its hidden states go to the next stage.

    The next piece's receive is posted before a piece runs, because a message moves only once its receive is posted.
    """

    def __init__(
        self, forward: ModelForward, transport: Transport, plan: RunPlan, memory: Memory | None = None
    ) -> None:
        """`forward` runs the whole model."""
        stage = StageForward(forward, stage_of(plan, forward.geometry, transport.rank, transport.size))
        self.stage, self.caches = stage, tuple[PrefixCache, ...]()
        super().__init__(stage, transport, plan, memory)
        self.first_layer = stage.layers.start
        make = partial(torch.empty, dtype=self.geometry.dtype, device=self.geometry.device)
        width, lengths = stage.model.config.hidden_size, () if stage.is_first else plan.partition.chunk_lens
        self._landings = [make(plan.batch, length, width) for length in lengths]  # memory for received pieces
        self._arriving: list[Pending] = []  # posted receives of this prefill's pieces

    @classmethod
    def chunk_of(cls, plan: RunPlan, rank: int, size: int) -> Chunk:
        """Return the whole context: every stage holds all tokens of its layers."""
        if plan.stage_layers is not None and len(plan.stage_layers) != size:
            raise InputError("partition", plan.label, f"one stage per rank, of which there are {size}")
        return Chunk(start=0, length=plan.context_len, batch=plan.batch)

    def make_cache(self, chunk: Chunk, memory: Memory | None) -> PrefixCache:
        """Make one cache per piece, all in the same memory; return that of the last piece, which covers all tokens."""
        layers = self.stage.layers
        memory = memory[layers.start : layers.stop] if memory else allocate(self.geometry, chunk)
        pieces = [
            replace(chunk, start=start, length=end - start, total_len=chunk.length, visible_len=end)
            for start, end in pairwise(self.plan.partition.boundaries)
        ]
        self.caches = tuple(PrefixCache(make_buffers(self.geometry, piece, memory), self) for piece in pieces)
        return self.caches[-1]

    def run(self, input_ids: Any) -> Any:
        """Run every piece through this stage; the final stage returns the last token's logits."""
        pieces, result = list(pairwise(self.plan.partition.boundaries)), None
        self._arriving.clear()
        self._post_piece(0)
        for number, (start, end) in enumerate(pieces):
            if number:
                self.clock.mark("start")
            inputs = input_ids[:, start:end] if self.stage.is_first else self._receive_piece(number)
            self._post_piece(number + 1)
            is_last = self.stage.is_final and number == len(pieces) - 1
            result = self.stage(inputs, start, self.caches[number], is_last=is_last)
            if not self.stage.is_final:
                self.send(result.contiguous(), None, self.rank + 1)
        return result if self.stage.is_final else None

    def on_update(self, event: UpdateEvent, layer: int) -> None:
        """Mark a layer by its number in the model instead of its number in the stage."""
        super().on_update(event, layer + self.stage.layers.start)

    def own_part(self, kept: KvPairs) -> KvPairs:
        """Return the caches of the stage's layers."""
        return kept[self.stage.layers.start : self.stage.layers.stop]

    def _post_piece(self, number: int) -> None:
        if not self.stage.is_first and number < len(self._landings):
            self._arriving.append(self.transport.irecv_prev(self._landings[number]))

    def _receive_piece(self, number: int) -> Any:
        self.wait_for(self._arriving[number], None, self.rank - 1)
        return self._landings[number]


def stage_of(plan: RunPlan, geometry: Geometry, rank: int, size: int) -> range:
    """Return the layer numbers of a rank; without stage_layers in the plan, layers are divided as evenly as possible.

    Raises InputError if the stages do not match the model's layers.
    """
    count = geometry.num_hidden_layers
    share, rest = divmod(count, size)
    layers = plan.stage_layers or tuple(share + (stage < rest) for stage in range(size))
    if len(layers) != size or sum(layers) != count or min(layers) < 1:
        text = ",".join(map(str, layers))
        raise InputError("stage_layers", text, f"{size} stages with the model's {count} layers, at least one each")
    return [range(*pair) for pair in pairwise(accumulate(layers, initial=0))][rank]
