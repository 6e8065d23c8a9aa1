"""K that has attention to it run in query blocks: several calls, each of some queries against the keys up to their end.

Models multiply all queries with all keys and hide what lies to the right of the diagonal. Here K is a tensor that
knows better: where a model hands it to scaled_dot_product_attention, or multiplies queries with it, the kernels that
the model asked for run block by block. The models' code stays as it is (torch.nn.attention.bias.CausalBias works the
same way), and so do its results but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as functional

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_ELEMENTWISE = (functional.softmax, functional.dropout, torch.softmax, torch.tanh)  # or along keys, of a query alone


def in_query_blocks(keys: Any, blocks: int) -> Any:
    """K [B, H, S, D], to which the last queries attend in so many calls; as it is for one."""
    if blocks == 1:
        return keys
    found = keys.as_subclass(KeysInBlocks)
    found.blocks = blocks
    return found


class KeysInBlocks(torch.Tensor):  # type: ignore[misc]
    """K, or a view or copy of it in which heads are repeated or dimensions swapped."""

    blocks: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attended(*args, **kwargs)
        if func in _PRODUCTS and isinstance(args[1], cls):
            return _Scores(args[0], args[1])
        if func is torch.Tensor.__rmatmul__:  # of a subclass Python asks this first
            return _Scores(args[1], args[0])
        found = super().__torch_function__(func, types, args, kwargs)
        if isinstance(found, cls):
            found.blocks = next(one.blocks for one in args if isinstance(one, cls))
        return found

    def each(self, call: Callable[..., Any], query: Any, value: Any, mask: Any = None) -> Any:
        """`call(query, key, value, mask)` of every block, joined."""
        keys = self.as_subclass(torch.Tensor)
        return torch.cat(
            [
                call(query[:, :, rows], keys[:, :, :stop], value[:, :, :stop], _part(mask, keys.shape[2], rows, stop))
                for rows, stop in _bounds(query.shape[2], keys.shape[2], self.blocks)
            ],
            dim=2,
        )


def _attended(
    query: Any, key: KeysInBlocks, value: Any, attn_mask: Any = None, *, is_causal: bool = False, **kwargs: Any
) -> Any:
    """The same arguments as torch's. Without a mask the kernel itself skips the masked half: one causal call."""
    call = functional.scaled_dot_product_attention
    if attn_mask is None:
        return call(query, key.as_subclass(torch.Tensor), value, is_causal=is_causal, **kwargs)
    return key.each(lambda q, k, v, mask: call(q, k, v, attn_mask=mask, **kwargs), query, value, attn_mask)


def _bounds(num_queries: int, num_keys: int, blocks: int) -> Iterator[tuple[slice, int]]:
    """The queries of each block, and how many keys are up to their end; queries are the last tokens."""
    ends = sorted({num_queries * number // blocks for number in range(blocks + 1)})
    for start, end in pairwise(ends):
        yield slice(start, end), num_keys - num_queries + end


def _part(operand: Any, num_keys: int, rows: slice, stop: int) -> Any:
    """What concerns a block, of an operand by queries and keys, such as a mask, or by keys; others as they are."""
    if not isinstance(operand, torch.Tensor) or operand.ndim < 2 or operand.shape[-1] != num_keys:
        return operand
    return operand[..., :stop] if operand.shape[-2] == 1 else operand[..., rows, :stop]


class _Scores:
    """Queries times keys, put off until the values come: what models do to the scores is noted, then done by blocks."""

    def __init__(self, query: Any, keys: KeysInBlocks) -> None:
        """query: [..., c, D]; keys: [..., D, S]."""
        self.query, self.keys, self.blocks = query, keys.as_subclass(torch.Tensor), keys.blocks
        self.dtype, self.steps = query.dtype, list[Callable[[Any, Callable[[Any], Any]], Any]]()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and isinstance(args[0], cls):
            return args[0] @ args[1]
        if func not in _ELEMENTWISE or not isinstance(args[0], cls):
            raise NotImplementedError(f"{getattr(func, '__name__', func)} of scores in query blocks")
        return args[0]._then(partial(func, **(kwargs or {})), *args[1:])

    def _then(self, func: Callable[..., Any], *others: Any) -> _Scores:
        self.steps.append(lambda scores, part: func(scores, *map(part, others)))
        return self

    def __mul__(self, other: Any) -> _Scores:
        return self._then(torch.mul, other)

    def __truediv__(self, other: Any) -> _Scores:
        return self._then(torch.div, other)

    def __add__(self, other: Any) -> _Scores:
        return self._then(torch.add, other)

    def to(self, dtype: Any) -> _Scores:
        """In another type."""
        return self._then(torch.Tensor.to, dtype)

    def view(self, *shape: int) -> _Scores:
        """As they are, by sequence, head, query and key."""
        return self

    def __matmul__(self, value: Any) -> Any:
        """The weights times V, [..., c, D]."""
        num_queries, num_keys = self.query.shape[-2], self.keys.shape[-1]
        found = []
        for rows, stop in _bounds(num_queries, num_keys, self.blocks):
            scores = self.query[..., rows, :] @ self.keys[..., :stop]
            for step in self.steps:
                scores = step(scores, lambda one, rows=rows, stop=stop: _part(one, num_keys, rows, stop))  # type: ignore[misc]
            found.append(scores @ value[..., :stop, :])
        return torch.cat(found, dim=-2)
