"""Notes of a plan that say when its advice matters little."""

from __future__ import annotations

import kvrsim


def test_even_chunks_will_do_where_the_host_sets_the_pace() -> None:
    """1k on 4 GPUs: kernels are issued more slowly than they run."""
    assert any(note.startswith("even chunks are") for note in kvrsim.plan(gpus=4, ctx="1k").warnings)


def test_they_will_not_where_attention_is_long() -> None:
    assert not any(note.startswith("even chunks are") for note in kvrsim.plan(gpus=4, ctx="16k").warnings)
