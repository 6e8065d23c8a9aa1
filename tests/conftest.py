"""Random models, machines and profiles, for the tests that state laws over all of them.

Each maker takes a random.Random; tests let Hypothesis draw its seed, which a failure then prints.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings

from kvrsim.architectures import read_config
from kvrsim.hardware import Cluster, GpuSpec, LinkSpec
from kvrsim.model import ModelSpec
from kvrsim.profile import (
    CacheCopies,
    CalibrationProfile,
    HostRates,
    KernelRates,
    LinkRates,
    SendStyle,
    ValidRange,
)
from kvrsim.request import DTYPES, Request
from kvrsim.scenario import Scenario
from kvrsim.units import JsonObject

settings.register_profile("laws", deadline=None, derandomize=True, max_examples=100, database=None)
settings.load_profile("laws")

ARCHITECTURES = ("llama", "gemma2", "mistral", "mixtral", "qwen3_moe", "falcon")


class Make:
    """What a test is made of, drawn at random within wide limits."""

    def log(self, rng: random.Random, low: float, high: float) -> float:
        """Between 10^low and 10^high, each decade as likely."""
        return float(10 ** rng.uniform(low, high))

    def model(self, rng: random.Random, *, layers: tuple[int, int] = (1, 4), kind: str | None = None) -> ModelSpec:
        """Heads shared or not, windows on all or on alternate layers, experts on all or on some layers."""
        kv_heads = rng.choice([1, 2, 4])
        heads = kv_heads * rng.choice([1, 2, 4])
        head_dim = rng.choice([8, 32, 64, 128])
        model_type = kind or rng.choice(ARCHITECTURES)
        config: dict[str, Any] = {
            "model_type": model_type,
            "hidden_size": heads * head_dim,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "num_hidden_layers": rng.randint(*layers),
            "intermediate_size": rng.choice([16, 500, 4000]),
            "vocab_size": rng.choice([50, 5000, 50000]),
        }
        if model_type in ("gemma2", "mistral"):
            config["sliding_window"] = rng.choice([1, 7, 64, 500, 4096])
        if model_type == "mixtral":
            config |= {"num_local_experts": 4, "num_experts_per_tok": rng.randint(1, 4), "sliding_window": None}
        if model_type == "qwen3_moe":
            config |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": rng.choice([8, 700])}
            config |= {"decoder_sparse_step": rng.choice([1, 2])}
        if model_type == "falcon":
            config |= {"alibi": rng.random() < 0.5, "parallel_attn": rng.random() < 0.5}
            config |= {"multi_query": rng.random() < 0.5}
        return read_config(JsonObject(fields=config, where="test"), "random")

    def gpu(self, rng: random.Random) -> GpuSpec:
        """From a small card to several of today's."""
        flops = self.log(rng, 12, 15)
        return GpuSpec(
            name="random",
            memory_bytes=80 * 10**9,
            hbm_bytes_per_s=self.log(rng, 11, 13),
            peak_flops=tuple((dtype, flops) for dtype in DTYPES),
            num_sms=100,
            l2_bytes=40_000_000,
            source="drawn at random",
        )

    def link(self, rng: random.Random, *, decades: tuple[float, float] = (7, 12)) -> LinkSpec:
        """From a slow network to better than NVLink."""
        bandwidth, latency = self.log(rng, *decades), rng.choice([0.0, self.log(rng, -7, -3)])
        return LinkSpec(name="random", bandwidth_bytes_per_s=bandwidth, latency_s=latency, source="drawn at random")

    def cluster(
        self,
        rng: random.Random,
        num_gpus: int,
        *,
        topologies: tuple[str, ...] = ("switch", "chain", "nodes"),
        decades: tuple[float, float] = (7, 12),
    ) -> Cluster:
        """Any layout; nodes of one to three GPUs."""
        topology = rng.choice(topologies)
        nodes = topology == "nodes"
        return Cluster(
            name="random",
            gpu=self.gpu(rng),
            num_gpus=num_gpus,
            link=self.link(rng, decades=decades),
            topology=topology,  # type: ignore[arg-type]
            gpus_per_node=rng.randint(1, 3) if nodes else None,
            network=self.link(rng, decades=decades) if nodes else None,
        )

    def profile(
        self, rng: random.Random, gpu: GpuSpec, *, sends: SendStyle | None = None, host: bool | None = None
    ) -> CalibrationProfile:
        """Rates between a thousandth and all of the datasheet's."""
        flops = gpu.peak_flops[0][1]
        host = rng.random() < 0.5 if host is None else host
        style: SendStyle = sends or rng.choice(["overlap", "rendezvous"])
        return CalibrationProfile(
            name="random",
            gpu=gpu.name,
            description="drawn at random",
            not_covered="",
            kernels=KernelRates(
                gemm_flops_per_s=flops * self.log(rng, -3, 0),
                attention_flops_per_s={kernel: flops * self.log(rng, -3, 0) for kernel in ("eager", "flash")},
                hbm_bytes_per_s=gpu.hbm_bytes_per_s * self.log(rng, -3, 0),
                score_bytes=rng.choice([0.0, 28.0]),
                fused=rng.random() < 0.5,
                copies=CacheCopies(**{key: rng.choice([0.0, 1.0, 3.0]) for key in CacheCopies.__slots__}),
                head_on_all_tokens=rng.random() < 0.5,
            ),
            host=HostRates(
                layer_s=self.log(rng, -6, -2) if host else 0.0,
                gather_piece_s=self.log(rng, -6, -4) if host else 0.0,
            ),
            links=LinkRates(link="random", bandwidth_bytes_per_s=1e9, latency_s=0.0, sends=style, sends_over_bus=style),
            valid=ValidRange(
                context_len=(1, 10**6), num_gpus=(1, 64), hidden_size=(1, 10**5), head_dim=(1, 10**4), dtypes=DTYPES
            ),
            residual=None,
            provenance={},
        )

    def scenario(
        self,
        rng: random.Random,
        *,
        num_gpus: tuple[int, int] = (2, 6),
        tokens: tuple[int, int] = (0, 4000),
        roofline: bool | None = None,
        sends: SendStyle | None = None,
        host: bool | None = None,
        layers: tuple[int, int] = (1, 4),
        topologies: tuple[str, ...] = ("switch", "chain", "nodes"),
        decades: tuple[float, float] = (7, 12),
        kind: str | None = None,
    ) -> Scenario:
        """A scenario with at least one new token a GPU and at most tokens[1] more; half with a cached prefix."""
        gpus = rng.randint(*num_gpus)
        cluster = self.cluster(rng, gpus, topologies=topologies, decades=decades)
        roofline = rng.random() < 0.15 if roofline is None else roofline
        cached = rng.choice([0, 0, 1, rng.randint(0, 5000)])
        spare = int(self.log(rng, 0, 3.6)) if tokens == (0, 4000) else rng.randint(*tokens)
        request = Request(
            context_len=cached + gpus + spare,
            cached_prefix=cached,
            batch=rng.choice([1, 1, 3]),
            dtype=rng.choice(DTYPES),
        )
        return Scenario(
            model=self.model(rng, layers=layers, kind=kind),
            cluster=cluster,
            request=request,
            profile=None if roofline else self.profile(rng, cluster.gpu, sends=sends, host=host),
            kernel=rng.choice(["eager", "flash"]),
        )

    def partition(self, rng: random.Random, num_tokens: int, num_ranks: int) -> tuple[int, ...]:
        """Uneven chunks of at least one token, often of just one."""
        weights = [rng.random() ** rng.choice([0.2, 1, 20]) for _ in range(num_ranks)]
        left, chunks = num_tokens - num_ranks, []
        for rank in range(num_ranks - 1):
            share = int(left * weights[rank] / max(1e-300, sum(weights[rank:])))
            chunks.append(1 + share)
            left -= share
        return (*chunks, 1 + left)

    def faster(self, scenario: Scenario, factor: float) -> Scenario:
        """The same with every rate of device and links `factor` times as high, and latencies as short."""
        gpu, kernels, link = scenario.cluster.gpu, None, scenario.cluster.link
        gpu = replace(
            gpu,
            hbm_bytes_per_s=gpu.hbm_bytes_per_s * factor,
            peak_flops=tuple((dtype, flops * factor) for dtype, flops in gpu.peak_flops),
        )

        def quick(link: LinkSpec) -> LinkSpec:
            return replace(
                link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor, latency_s=link.latency_s / factor
            )

        network = scenario.cluster.network
        cluster = replace(
            scenario.cluster, gpu=gpu, link=quick(link), network=None if network is None else quick(network)
        )
        profile = scenario.profile
        if profile is not None:
            kernels = replace(
                profile.kernels,
                gemm_flops_per_s=profile.kernels.gemm_flops_per_s * factor,
                hbm_bytes_per_s=profile.kernels.hbm_bytes_per_s * factor,
                attention_flops_per_s={
                    kernel: rate * factor for kernel, rate in profile.kernels.attention_flops_per_s.items()
                },
            )
            profile = replace(profile, kernels=kernels)
        return replace(scenario, cluster=cluster, profile=profile)


@pytest.fixture(scope="session")
def make() -> Make:
    """Makers of random models, machines, profiles, scenarios and partitions."""
    return Make()


@pytest.fixture(scope="session")
def config() -> Callable[..., ModelSpec]:
    """A small Llama with these keys of config.json in the place of its own."""

    def build(**keys: Any) -> ModelSpec:
        fields = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        fields |= {"num_hidden_layers": 2, "vocab_size": 101} | keys
        return read_config(JsonObject(fields=fields, where="test"), "small")

    return build
