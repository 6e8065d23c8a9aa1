"""How a context is split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrsim.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Chunk lengths, one a rank, in the order of the context.

    >>> Partition.even(10, 4).chunk_lens
    (3, 3, 2, 2)
    >>> Partition(chunk_lens=(28, 42, 26)).boundaries
    (0, 28, 70, 96)
    """

    chunk_lens: tuple[int, ...]  # tokens that each rank takes, every one at least 1

    def __post_init__(self) -> None:
        if not self.chunk_lens or any(not isinstance(chunk, int) or chunk < 1 for chunk in self.chunk_lens):
            accepted = "a chunk of at least 1 token a rank, a whole number"
            raise InputError("partition", ",".join(map(str, self.chunk_lens)), accepted)

    @classmethod
    def even(cls, num_tokens: int, num_ranks: int) -> Partition:
        """Equal chunks; the first ranks take the remainder, as the paper's example does (3, 3, 3, 2)."""
        if num_tokens < num_ranks:
            raise InputError("gpus", num_ranks, f"at most one GPU a token, here {num_tokens}")
        share, rest = divmod(num_tokens, num_ranks)
        return cls(chunk_lens=tuple(share + (rank < rest) for rank in range(num_ranks)))

    @classmethod
    def of(cls, chunk_lens: Sequence[int], *, num_tokens: int, num_ranks: int) -> Partition:
        """A partition that a user wrote, checked against the request.

        Raises InputError where the number of chunks or their sum is wrong.
        """
        shown = ",".join(map(str, chunk_lens))
        if len(chunk_lens) != num_ranks:
            raise InputError("partition", shown, f"{num_ranks} chunk lengths, one a GPU")
        if sum(chunk_lens) != num_tokens:
            raise InputError(
                "partition", shown, f"chunk lengths that sum to {num_tokens} tokens, not {sum(chunk_lens)}"
            )
        return cls(chunk_lens=tuple(chunk_lens))

    @property
    def num_tokens(self) -> int:
        """Tokens in all chunks together."""
        return sum(self.chunk_lens)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The paper's C[0, ..., C]: where each chunk starts, and the end."""
        ends = [0]
        for chunk in self.chunk_lens:
            ends.append(ends[-1] + chunk)
        return tuple(ends)

    @property
    def fractions(self) -> tuple[float, ...]:
        """Each rank's share of the tokens."""
        return tuple(chunk / self.num_tokens for chunk in self.chunk_lens)
