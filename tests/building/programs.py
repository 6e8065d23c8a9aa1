"""Random small programs whose times are small integers, so that many events happen at the same time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvrsim.hardware import Cluster, LinkSpec
from kvrsim.program import AllGather, AllToAll, Array, Collective, Compute, Load, Op, Program, Recv, RingPass, Send
from tests.building.machines import any_cluster, plain

_EXCHANGES = (
    ("message", "collective", "load"),
    ("message", "none"),
    ("gather", "groups", "ring", "exchange", "message", "collective"),
)


def small_cluster(rng: random.Random, num_gpus: int) -> Cluster:
    """A cluster whose links carry one or two bytes per second, with latencies of up to two seconds."""
    cluster = plain(any_cluster(rng, num_gpus, topologies=("switch", "chain", "nodes", "bus")))

    def small(link: LinkSpec) -> LinkSpec:
        return replace(link, bandwidth_bytes_per_s=float(rng.randint(1, 2)), latency_s=float(rng.randint(0, 2)))

    return replace(cluster, link=small(cluster.link), network=small(cluster.network) if cluster.network else None)


def small_program(rng: random.Random, num_ranks: int, num_rows: int) -> Program:
    """A program with one or two kinds of layers in a period, which may repeat.

    Messages overlap, leave in turn, or hold the streams. In half of the programs, some hosts delay their devices.
    """
    style = rng.choice(["overlap", "in turn", "rendezvous"])
    exchanges = rng.choice(_EXCHANGES[: 2 if style == "in turn" else None])
    overlaps, share, ranks = rng.random() < 0.7, rng.choice([0.0, 0.5]), range(num_ranks)
    slowest_s = rng.choice([[0] * num_ranks, rng.choices([0, 1, 4], k=num_ranks)])  # longest host time, by rank

    def seconds(*shape: int) -> Array:
        return np.array(rng.choices(range(5), k=int(np.prod(shape)) * num_rows), dtype=float).reshape(*shape, num_rows)

    def host_s(rank: int) -> float:
        return float(rng.randint(0, slowest_s[rank]))

    def work() -> list[list[Op]]:
        number = rng.choice([1, 1, 9])
        return [
            [Compute(name="work", device_s=seconds(), host_s=host_s(rank)) for _ in range(rng.randint(0, number))]
            for rank in ranks
        ]

    collectives: dict[str, Callable[[int], Op]] = {
        "gather": lambda rank: AllGather(nbytes=seconds(), host_s=host_s(rank)),
        "groups": lambda rank: AllGather(nbytes=seconds(), host_s=host_s(rank), among=2 if num_ranks == 4 else None),
        "exchange": lambda rank: AllToAll(nbytes=seconds(num_ranks - 1), host_s=host_s(rank)),
        "collective": lambda rank: Collective(name="sum", seconds=seconds(), nbytes=np.ones(1), host_s=host_s(rank)),
        "ring": lambda rank: RingPass(
            name="work",
            device_s=seconds(num_ranks),
            nbytes=seconds(num_ranks - 1),
            host_s=tuple(host_s(rank) for _ in ranks),
            overlaps=overlaps,
            message_share=share,
        ),
    }

    def block(names: list[str]) -> tuple[tuple[Op, ...], ...]:
        ops = work()
        for name in names:
            rank = rng.randrange(num_ranks)
            if name == "message":
                dst = (rank + rng.randint(1, num_ranks - 1)) % num_ranks
                holds, in_turn = style == "rendezvous", style == "in turn"
                ops[rank].append(
                    Send(dst=dst, nbytes=seconds(), host_s=host_s(rank), rendezvous=holds, in_turn=in_turn)
                )
                ops[dst].append(Recv(src=rank, host_s=host_s(dst), rendezvous=holds))
            elif name == "load":
                load_s = np.array([float(rng.randint(0, 9))])
                ops[rank].append(Load(name="host", nbytes=np.ones(1), seconds=load_s, latency_s=1.0, ahead=overlaps))
            for rank, (own, more) in enumerate(zip(ops, work(), strict=True)):
                own.extend([collectives[name](rank), *more] if name in collectives else more)
        return tuple(map(tuple, ops))

    kinds = [block(rng.choices(exchanges, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 2))]
    period = tuple(rng.choices(range(len(kinds)), k=rng.randint(1, 3)))
    prologue, slowest_s = block([]), [40 * one for one in slowest_s]  # hosts that lead in the layers may then be late
    return Program(
        strategy="small",
        prologue=prologue,
        layers=tuple(kinds),
        layer_kind_index=period * rng.choice([1, 2, 9]),
        epilogue=block([]),
    )
