"""Random models, machines and profiles, for the tests that state laws over all of them.

Each maker takes a random.Random; tests let Hypothesis draw its seed, which a failure then prints.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from kvrsim.choices import DTYPES
from kvrsim.compile import for_strategy
from kvrsim.errors import InputError
from kvrsim.hardware.cluster import Cluster
from kvrsim.hardware.gpu import GpuSpec
from kvrsim.hardware.links import LinkSpec
from kvrsim.io.json_text import JsonObject
from kvrsim.model.architectures import read_config
from kvrsim.model.spec import ModelSpec
from kvrsim.profile.profile import (
    OPERATION_KINDS,
    CacheCopies,
    CalibrationProfile,
    HostRates,
    KernelRates,
    LinkRates,
    OperationFit,
    SendStyle,
    ValidRange,
)
from kvrsim.profile.rates.attention import BlockedRates, EagerRates, FlashRates
from kvrsim.profile.rates.elementwise import ELEMENTWISE_OPS, ElementwiseRates
from kvrsim.profile.rates.gemm import GemmRates, MeasuredShape, Product, Tile, merged
from kvrsim.profile.rates.links import GatherRates
from kvrsim.profile.rates.sizes import MeasuredSizes
from kvrsim.request import Request
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from kvrsim.units import scale

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
            source="drawn at random",
        )

    def link(self, rng: random.Random, *, decades: tuple[float, float] = (7, 12)) -> LinkSpec:
        """From a slow network to better than NVLink; short messages and all-gathers as others, or as measured."""
        bandwidth, latency = self.log(rng, *decades), rng.choice([0.0, self.log(rng, -7, -3)])
        return LinkSpec(
            name="random",
            bandwidth_bytes_per_s=bandwidth,
            latency_s=latency,
            source="drawn at random",
            short_bytes_per_s=rng.choice([None, bandwidth * self.log(rng, 0, 2)]),
            gather=rng.choice([None, self.gather(rng, bandwidth)]),
        )

    def gather(self, rng: random.Random, bandwidth: float) -> GatherRates:
        """Either protocol the faster, or the first for short messages alone."""
        return GatherRates(
            launch_s=rng.choice([0.0, self.log(rng, -6, -4)]),
            hop_s=rng.choice([0.0, self.log(rng, -7, -5)]),
            small_bytes_per_s=bandwidth * self.log(rng, -1, 0.5),
            large_bytes_per_s=bandwidth * self.log(rng, -0.5, 0.5),
            setup_s=rng.choice([0.0, self.log(rng, -6, -3)]),
            own_share=rng.choice([0.0, rng.random()]),
        )

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

    def gemm(self, rng: random.Random, gpu: GpuSpec, *, shapes: Sequence[Product] = ()) -> GemmRates:
        """No tiles or up to four; then some of the shapes as measured. None beats the datasheet."""
        peak = gpu.peak_flops[0][1]
        share = self.log(rng, -3, 0)
        tiles = [
            Tile(
                rows=rng.choice([16, 64, 128, 256, rng.randint(1, 300)]),
                cols=rng.choice([32, 64, 128, 256]),
                flops_share=rng.choice([1.0, rng.uniform(0.05, 1.0)]),
                start_s=rng.choice([0.0, self.log(rng, -8, -5)]),
            )
            for _ in range(rng.choice([0, 0, 0, 0, 1, 2, 3, 4]))
        ]
        rates = GemmRates(
            flops_per_s=peak * share,
            bytes_per_s=gpu.hbm_bytes_per_s * self.log(rng, -2, 0),
            launch_s=rng.choice([0.0, self.log(rng, -7, -5)]),
            concurrent_tiles=rng.choice([1, 108, rng.randint(2, 300)]),
            tiles=tuple(tiles),
            sustained_flops_per_s=rng.choice([None, peak * share * rng.uniform(0.3, 1.0)]),
            burst_flops=rng.choice([0.0, self.log(rng, 6, 12)]),
        )
        chosen = [product for product in shapes if tiles and rng.random() < 0.25]
        return replace(rates, measured=tuple(self._measured(rng, rates, product, share) for product in chosen))

    def _measured(self, rng: random.Random, rates: GemmRates, product: Product, share: float) -> MeasuredShape:
        """Up to four times slower than the form or faster, as far as the datasheet allows."""
        rows = sorted(rng.sample(range(1, 9000), rng.randint(1, 6)))
        form_s = rates.form_s(np.array(rows, dtype=float), product, 2)
        seconds = [float(one) * max(share, self.log(rng, -0.6, 0.6)) for one in form_s]
        width = dict(in_features=product.in_features, out_features=product.out_features)
        return MeasuredShape(**width, rows=tuple(rows), seconds=tuple(seconds))

    def eager(self, rng: random.Random, gpu: GpuSpec) -> EagerRates:
        """Rates between a thousandth and all of the datasheet's."""
        return EagerRates(
            flops_per_s=gpu.peak_flops[0][1] * self.log(rng, -3, 0),
            bytes_per_s=gpu.hbm_bytes_per_s * self.log(rng, -3, 0),
            start_s=rng.choice([0.0, self.log(rng, -7, -4)]),
        )

    def flash(self, rng: random.Random, gpu: GpuSpec) -> FlashRates:
        """Any way to write the kernel; steps as fast as the datasheet allows, or up to a thousand times slower."""
        peak = gpu.peak_flops[0][1]
        tile_rows, key_block = rng.choice([1, 16, 64, 128, 192]), rng.choice([1, 16, 64, 128, 256])
        num_sms = rng.choice([1, 108, 132, rng.randint(2, 300)])
        concurrent_tiles = num_sms * rng.choice([1, 2, 3])
        block_s = 4 * 128 * tile_rows * key_block * concurrent_tiles / (peak * self.log(rng, -3, 0))
        return FlashRates(
            tile_rows=tile_rows,
            key_block=key_block,
            concurrent_tiles=concurrent_tiles,
            num_sms=num_sms,
            causal=rng.random() < 0.5,
            packs_heads=rng.random() < 0.5,
            splits_keys=rng.random() < 0.5,
            flops_per_s=peak,
            launch_s=rng.choice([0.0, self.log(rng, -7, -4)]),
            tile_s=rng.choice([0.0, block_s * self.log(rng, -1, 2)]),
            block_s=block_s,
            alone_share=rng.choice([1.0, rng.uniform(0.1, 1.0)]),
            barrier_share=rng.choice([0.0, 1.0, rng.random()]),
            append_bytes_per_s=rng.choice([1e30, gpu.hbm_bytes_per_s * self.log(rng, -3, 0)]),
            query_s=rng.choice([0.0, self.log(rng, -12, -8)]),
            split_s=rng.choice([0.0, self.log(rng, -6, -4)]),
            split_share=rng.choice([1.0, rng.uniform(0.1, 1.0)]),
            diagonal_cost=rng.choice([1.0, rng.uniform(1.0, 3.0)]),
        )

    def sizes(self, rng: random.Random, least: float) -> MeasuredSizes:
        """Up to thirty times slower, or faster down to a factor; longer calls never take less."""
        sizes = np.sort(10 ** np.array([rng.uniform(0, 9) for _ in range(rng.randint(1, 12))]))
        seconds = sizes * np.array([max(least, self.log(rng, -1, 1.5)) for _ in sizes])
        factors = np.maximum.accumulate(seconds) / sizes
        return MeasuredSizes(sizes=tuple(map(float, sizes)), factors=tuple(map(float, factors)))

    def blocked(self, rng: random.Random, gpu: GpuSpec) -> BlockedRates:
        """Rates between a thousandth and all of the datasheet's, of halves and rectangles alike or not."""
        peak = gpu.peak_flops[0][1]
        shares = [self.log(rng, -3, 0) for _ in range(2)]
        return BlockedRates(
            causal_flops_per_s=peak * shares[0],
            rectangle_flops_per_s=peak * rng.choice(shares),
            start_s=rng.choice([0.0, self.log(rng, -7, -4)]),
            query_s=rng.choice([0.0, self.log(rng, -12, -8)]),
            key_block=rng.choice([1, 64, 512]),
            skips_masked=rng.random() < 0.5,
            join_s=rng.choice([0.0, self.log(rng, -12, -8)]),
            measured=rng.choice([None, self.sizes(rng, max(shares))]),
        )

    def elementwise(self, rng: random.Random, gpu: GpuSpec) -> ElementwiseRates:
        """One rate for all kernels or one for each, with a start or without."""
        rates = ElementwiseRates.uniform(
            gpu.hbm_bytes_per_s * self.log(rng, -3, 0),
            fused=rng.random() < 0.5,
            start_s=rng.choice([0.0, self.log(rng, -7, -5)]),
        )
        if rng.random() < 0.5:
            return rates
        own: dict[str, Any] = {op: gpu.hbm_bytes_per_s * self.log(rng, -3, 0) for op in ELEMENTWISE_OPS}
        return replace(rates, **own)

    def kernels(self, rng: random.Random, gpu: GpuSpec, *, shapes: Sequence[Product] = ()) -> KernelRates:
        """Rates between a thousandth and all of the datasheet's."""
        return KernelRates(
            gemm=self.gemm(rng, gpu, shapes=shapes),
            attention={"eager": self.eager(rng, gpu), "flash": self.flash(rng, gpu)},
            elementwise=self.elementwise(rng, gpu),
            copies=CacheCopies(**{key: rng.choice([0.0, 1.0, 3.0]) for key in CacheCopies.__slots__}),
            head_on_all_tokens=rng.random() < 0.5,
        )

    def profile(
        self,
        rng: random.Random,
        gpu: GpuSpec,
        *,
        sends: SendStyle | None = None,
        host: bool | None = None,
        shapes: Sequence[Product] = (),
    ) -> CalibrationProfile:
        """Any rates, some of them known to be off by so much; `shapes`: of products that may have been measured."""
        host = rng.random() < 0.5 if host is None else host
        style: SendStyle = sends or rng.choice(["overlap", "rendezvous"])
        link = self.link(rng)
        return CalibrationProfile(
            name="random",
            gpu=gpu.name,
            description="drawn at random",
            not_covered="",
            kernels=self.kernels(rng, gpu, shapes=shapes),
            host=HostRates(
                layer_s=self.log(rng, -6, -2) if host else 0.0,
                gather_piece_s=self.log(rng, -6, -4) if host else 0.0,
                resume_s=rng.choice([0.0, self.log(rng, -6, -3)]) if host else 0.0,
            ),
            links=LinkRates(
                link="random",
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                latency_s=link.latency_s,
                short_bytes_per_s=link.short_bytes_per_s,
                gather=link.gather,
                sends=style,
                sends_over_bus=style,
            ),
            valid=ValidRange(
                context_len=(1, 10**6), num_gpus=(1, 64), hidden_size=(1, 10**5), head_dim=(1, 10**4), dtypes=DTYPES
            ),
            operations={kind: self.operation(rng) for kind in OPERATION_KINDS if rng.random() < 0.2},
            residual=None,
            provenance={},
        )

    def operation(self, rng: random.Random) -> OperationFit:
        """Off by up to a fifth."""
        return OperationFit(
            source="drawn at random",
            num_rows=rng.randint(0, 100),
            mape=rng.random() / 5,
            cross_validated_mape=rng.random() / 5,
            log_sd=rng.random() / 5,
            interpolated_log_sd=rng.choice([None, rng.random() / 5]),
            seen={"chunk": (1.0, self.log(rng, 0, 5))},
        )

    def shapes(self, model: ModelSpec) -> list[Product]:
        """Of the model's products, alone and as a serving engine merges them."""
        found: dict[Product, None] = {}
        for layer in model.layer_kinds:
            for gemms in (layer.qkv, (layer.output,), layer.mlp):
                alone = [Product(gemm.in_features, gemm.out_features) for gemm in gemms]
                found |= dict.fromkeys((*alone, *merged(alone)))
        return list(found)

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
            dtype=rng.choice(["fp16", "bf16", "fp8"]),
        )
        model = self.model(rng, layers=layers, kind=kind)
        shapes = self.shapes(model)
        return Scenario(
            model=model,
            cluster=cluster,
            request=request,
            profile=None if roofline else self.profile(rng, cluster.gpu, sends=sends, host=host, shapes=shapes),
            kernel=rng.choice(["eager", "flash"]),
        )

    def as_measured(self, rng: random.Random, scenario: Scenario) -> Scenario:
        """The same by what only own measurements tell: kernels by what they cover, copies in place, the prologue."""
        profile, gpu = scenario.profile, scenario.cluster.gpu
        if profile is None:
            return replace(scenario, kernel="sdpa")
        kernels = profile.kernels
        eager = self.eager(rng, gpu)
        share = eager.flops_per_s / gpu.peak_flops[0][1]
        eager = replace(eager, measured=self.sizes(rng, share))
        kernels = replace(
            kernels,
            gemm=replace(kernels.gemm, head_bytes_per_s=gpu.hbm_bytes_per_s * self.log(rng, -3, 0)),
            attention={"flash": self.blocked(rng, gpu), "eager": eager, "sdpa": self.blocked(rng, gpu)},
            elementwise=replace(
                kernels.elementwise,
                mask_element_s=rng.choice([0.0, self.log(rng, -12, -8)]),
            ),
            copies=replace(kernels.copies, own=rng.choice([0.0, 1.0])),
            whole_attention=rng.random() < 0.5,
        )
        host = replace(profile.host, request_s=rng.choice([0.0, self.log(rng, -5, -2)]))
        return replace(
            scenario,
            profile=replace(profile, kernels=kernels, host=host, cluster=rng.choice([None, scenario.cluster])),
            request=replace(scenario.request, dtype=rng.choice(["fp16", "fp32"])),
            kernel=rng.choice(["eager", "sdpa", "flash"]),
        )

    def divisible(self, rng: random.Random, **options: Any) -> Scenario:
        """A scenario whose GPUs, heads and layers divide into groups of two and four, and into as many ranks."""
        options = {"num_gpus": (4, 4), "layers": (4, 6), "topologies": ("switch", "chain")} | options
        while True:
            scenario = self.scenario(rng, **options)
            kv_heads = scenario.model.num_key_value_heads
            if scenario.model.num_attention_heads % 4 == 0 and (kv_heads in (1, 2) or kv_heads % 4 == 0):
                return scenario

    def placed(self, rng: random.Random, strategy: Strategy) -> tuple[Scenario, tuple[int, ...]]:
        """A scenario as the strategy sees it, and chunks of any length for it."""
        while True:
            nodes = rng.random() < 0.3
            scenario = (
                self.divisible(rng)
                if rng.random() < 0.5 and not nodes
                else self.scenario(rng, num_gpus=(1, 8), layers=(1, 8))
            )
            if rng.random() < 0.3:
                scenario = self.as_measured(rng, scenario)
            try:
                placed = for_strategy(scenario, strategy)
            except InputError:
                continue
            pieces = placed.cluster.num_gpus
            if strategy.pipeline:
                pieces = min(placed.request.new_tokens, rng.randint(1, 6))
            return placed, self.partition(rng, placed.request.new_tokens, pieces)

    def weights(self, model: ModelSpec) -> int:
        """Of the layers' matrices, those that a token passes through."""
        return sum(
            sum(part.in_features * part.out_features for part in (*layer.qkv, layer.output, *layer.shared_mlp))
            + max(1, layer.num_experts_per_tok) * sum(part.in_features * part.out_features for part in layer.mlp)
            for layer in model.layers
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

    def plain(self, cluster: Cluster) -> Cluster:
        """The same cluster with nothing known of short messages and all-gathers."""
        network = cluster.network
        return replace(
            cluster,
            link=replace(cluster.link, short_bytes_per_s=None, gather=None),
            network=None if network is None else replace(network, short_bytes_per_s=None, gather=None),
        )

    def faster(self, scenario: Scenario, factor: float) -> Scenario:
        """The same with every rate of device and links `factor` times as high, and latencies as short."""
        cluster, profile = scenario.cluster, scenario.profile
        gpu = replace(
            cluster.gpu,
            hbm_bytes_per_s=cluster.gpu.hbm_bytes_per_s * factor,
            peak_flops=tuple((dtype, flops * factor) for dtype, flops in cluster.gpu.peak_flops),
        )
        cluster = replace(
            cluster,
            gpu=gpu,
            link=scale(cluster.link, 1 / factor),
            network=scale(cluster.network, 1 / factor),
        )
        if profile is not None:
            kernels = replace(
                profile.kernels,
                gemm=scale(profile.kernels.gemm, 1 / factor),
                attention={kernel: scale(rates, 1 / factor) for kernel, rates in profile.kernels.attention.items()},
                elementwise=scale(profile.kernels.elementwise, 1 / factor),
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


@dataclass
class FakeEvent:
    """A CUDA event: it happens when the device comes to it."""

    cuda: FakeCuda
    at_s: float | None = None

    def record(self) -> None:
        self.at_s = self.cuda.device_s

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.cuda.synchronized, "events are read before the device has come to them"
        assert self.at_s is not None
        assert other.at_s is not None
        return 1e3 * (other.at_s - self.at_s)


@dataclass
class FakeCuda:
    """torch.cuda with a device whose work is done by the clock of the test."""

    device_s: float = 0.0
    event_s: float = 0.0  # seconds of work that the device has been given between any two events
    synchronized: bool = False
    slept_cycles: list[int] = field(default_factory=list)

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802 - torch's name
        assert enable_timing
        self.compute(self.event_s)
        return FakeEvent(self)

    def current_stream(self) -> FakeCuda:
        return self  # it has one stream, which can wait for its own work

    def synchronize(self) -> None:
        self.synchronized = True

    def _sleep(self, cycles: int) -> None:
        self.slept_cycles.append(cycles)

    def compute(self, seconds: float) -> None:
        """A kernel."""
        self.device_s += seconds
        self.synchronized = False


@pytest.fixture
def fake_cuda() -> FakeCuda:
    """A device for clocks that would measure one."""
    return FakeCuda()
