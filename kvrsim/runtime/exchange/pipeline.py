"""Pipelines: each rank is a stage with some of the layers, through which the context goes piece by piece."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrsim.errors import InputError
from kvrsim.runtime.exchange import Exchange
from kvrsim.runtime.geometry import Geometry, KvLayout
from kvrsim.runtime.kv_cache import Chunk, Memory, PrefixCache, UpdateEvent, allocate, make_buffers
from kvrsim.runtime.model import ModelForward, light_copy
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.transport import Pending, Transport

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StageForward(ModelForward):
    """The layers of one stage; the first stage has the embedding, the last stage the final norm and the head.

    Its layers count from 0, in the model, its geometry and its cache.
    """

    def __init__(self, whole: ModelForward, layers: range) -> None:
        """`layers` are the numbers of the stage's layers in the whole model."""
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_final = layers.stop == whole.geometry.num_hidden_layers
        model = light_copy(whole.model)
        self._keep_stage(model, whole.geometry)
        super().__init__(model, replace(whole.geometry, layouts=whole.geometry.layouts[layers.start : layers.stop]))

    def _keep_stage(self, model: PreTrainedModel, geometry: Geometry) -> None:
        """Leave only the stage's layers in a copy of the model and in its configuration."""
        base = model.base_model
        config = model.config
        first = self.layers.start
        stop = self.layers.stop
        layers = getattr(base, geometry.family.layers)[first:stop]
        setattr(base, geometry.family.layers, layers)
        for module in layers.modules():
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
        stage = StageForward(forward, stage_of(plan, transport.rank))
        self.stage = stage
        self.caches = tuple[PrefixCache, ...]()
        super().__init__(stage, transport, plan, memory)
        self.first_layer = stage.layers.start
        make = partial(torch.empty, dtype=self.geometry.dtype, device=self.geometry.device)
        width = stage.model.config.hidden_size
        lengths: tuple[int, ...] = ()
        if not stage.is_first:
            lengths = plan.partition.chunk_lens
        self._landings = [make(plan.batch, length, width) for length in lengths]  # memory for received pieces
        self._arriving: list[Pending] = []  # posted receives of this prefill's pieces

    @classmethod
    def chunk_of(cls, plan: RunPlan, rank: int, size: int) -> Chunk:
        """Return the whole context: every stage holds all tokens of its layers."""
        return Chunk(start=0, length=plan.context_len, batch=plan.batch)

    @classmethod
    def check(cls, plan: RunPlan, geometry: Geometry) -> None:
        """Raise InputError for a stage without attention: transformers counts the tokens by their K and V."""
        super().check(plan, geometry)
        for rank in range(len(plan.stage_layers or ())):
            layers = stage_of(plan, rank)
            if not any(isinstance(layout, KvLayout) for layout in geometry.layouts[layers.start : layers.stop]):
                accepted = f"stages that all have attention, which layers {list(layers)} of {geometry.model_type} lack"
                raise InputError("strategy", plan.name, accepted)

    def make_cache(self, chunk: Chunk, memory: Memory | None) -> PrefixCache:
        """Make one cache per piece, all in the same memory; return that of the last piece, which covers all tokens."""
        layers = self.stage.layers
        if memory:
            memory = memory[layers.start : layers.stop]
        else:
            memory = allocate(self.geometry, chunk)
        caches = []
        for start, end in pairwise(self.plan.partition.boundaries):
            piece = replace(chunk, start=start, length=end - start, total_len=chunk.length, visible_len=end)
            caches.append(PrefixCache(make_buffers(self.geometry, piece, memory), self))
        self.caches = tuple(caches)
        return caches[-1]

    def run(self, input_ids: Tensor) -> Tensor | None:
        """Run every piece through this stage; the final stage returns the last token's logits."""
        pieces = list(pairwise(self.plan.partition.boundaries))
        result = None
        self._arriving.clear()
        self._post_piece(0)
        for number, (start, end) in enumerate(pieces):
            if number:
                self.clock.mark("start")
            if self.stage.is_first:
                inputs = input_ids[:, start:end]
            else:
                inputs = self._receive_piece(number)
            self._post_piece(number + 1)
            is_last = self.stage.is_final and number == len(pieces) - 1
            result = self.stage(inputs, start, self.caches[number], is_last=is_last)
            if not self.stage.is_final:
                self.send(result.contiguous(), None, self.rank + 1)
        if not self.stage.is_final:
            return None
        return result

    def on_update(self, event: UpdateEvent, layer: int) -> None:
        """Mark a layer by its number in the model instead of its number in the stage."""
        super().on_update(event, layer + self.stage.layers.start)

    def _post_piece(self, number: int) -> None:
        if not self.stage.is_first and number < len(self._landings):
            self._arriving.append(self.transport.irecv_prev(self._landings[number]))

    def _receive_piece(self, number: int) -> Tensor:
        self.wait_for(self._arriving[number], None, self.rank - 1)
        return self._landings[number]


def stage_of(plan: RunPlan, rank: int) -> range:
    """Return the layer numbers of a rank."""
    assert plan.stage_layers is not None
    first = sum(plan.stage_layers[:rank])
    return range(first, first + plan.stage_layers[rank])
