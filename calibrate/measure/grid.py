"""Which chunks and prefixes of a layer are timed."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_CHUNK = 64


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Point:
    """One forward pass: `chunk` tokens behind `prefix` tokens whose keys and values are there."""

    kernel: str  # attention: "eager", "sdpa" or "flash"
    chunk: int
    prefix: int

    @property
    def key(self) -> str:
        """As journals and people write it."""
        return f"{self.kernel} {self.chunk}+{self.prefix}"

    @classmethod
    def parse(cls, key: str) -> Point:
        """Back from its key."""
        kernel, _, sizes = key.partition(" ")
        chunk, _, prefix = sizes.partition("+")
        return cls(kernel=kernel, chunk=int(chunk), prefix=int(prefix))


def grid(max_context: int, kernels: tuple[str, ...]) -> list[Point]:
    """Points up to `max_context` tokens for each attention kernel, the most telling first.

    Chunks double from 64 on, with one between that no tile divides, alone and behind prefixes of a half, one and
    three times their length, and of what is left of the context: the first tells projections and causal squares, the
    others the rectangles before them. The second and later kernels share all but attention with the first, and get
    every other chunk. Powers of two, alone and at the end of the context, are the frame: what lies between comes later.
    """
    ranked: dict[Point, tuple[int, int, int]] = {}
    for index, kernel in enumerate(kernels):
        chunks = _chunks(max_context)
        for place, chunk in enumerate(chunks):
            if index > 0 and place % 2 and len(chunks) > 1:
                continue
            for rank, prefix in enumerate((0, max_context - chunk, chunk, 3 * chunk, chunk // 2)):
                if prefix + chunk <= max_context:
                    point = Point(kernel=kernel, chunk=chunk, prefix=prefix)
                    ranked.setdefault(point, (max(rank - 1, 0) + 2 * (place % 2), index, chunk))
    return sorted(ranked, key=lambda point: ranked[point])


def _chunks(max_context: int) -> list[int]:
    """64, 96, 128, 192 ...: powers of two, and at odd places the ones half-way."""
    chunks, chunk = [], _LEAST_CHUNK
    while chunk <= max_context:
        chunks += [one for one in (chunk, chunk * 3 // 2) if one <= max_context]
        chunk *= 2
    return chunks or [max_context]
