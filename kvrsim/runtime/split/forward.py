"""SplitForward: the forward of one rank's part of a model; `light_copy`: a model to be cut, its weights not copied."""

from __future__ import annotations

import copy
from typing import Any

from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.model import ModelForward


class SplitForward(ModelForward):
    """The forward of a part of a model. Its digest is that of the whole model."""

    def __init__(self, whole: ModelForward, part: Any, geometry: Geometry) -> None:
        """geometry: what the part's layers keep."""
        super().__init__(part, geometry)
        self.whole_geometry = whole.whole_geometry
        self._whole_digest = whole.digest()

    def digest(self) -> str:
        """The whole model's, which is the same on every rank."""
        return self._whole_digest


def light_copy(model: Any) -> Any:
    """The same modules again, over the same weights and buffers."""
    weights = {id(one): one for one in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, weights)


def part_of(tensor: Any, dim: int, start: int, end: int, *, own: bool) -> Any:
    """Rows from `start` to `end` of a dimension of a weight; own: in memory of its own, else a view."""
    from torch.nn import Parameter

    part = tensor.detach().narrow(dim, start, end - start)
    return Parameter(part.clone() if own else part, requires_grad=False)
