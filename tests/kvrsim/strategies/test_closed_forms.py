"""Without contention, strategies take the time of their papers' formulas, which are written here independently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvrsim
from kvrsim.compile import build_program
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.kernels.tensor_parallel import group_of
from kvrsim.placement import PlacedScenario
from kvrsim.program import AllGather, Array, Compute, Program
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import Search
from planner.simulate import run_simulation
from tests.building import executed

SHAPES = [("llama-2-7b", 2, 4096), ("llama-2-7b", 8, 16384), ("llama-3-8b", 4, 8192), ("mistral-7b", 8, 2048)]
LINKS = ["300GB/s", "1GB/s"]


def scenario_of(model: str, gpus: int, ctx: int, bandwidth: str, latency: str = "20us") -> Scenario:
    """A scenario with datasheet rates and overlapping messages: no host time, no short messages, one path per pair."""
    scenario, _ = kvrsim.make_scenario(
        ctx=ctx, gpus=gpus, model=model, profile="roofline", link_bandwidth=bandwidth, link_latency=latency
    )
    return scenario


def number(value: Array) -> float:
    return float(np.asarray(value).item())


class Layer:
    """Seconds of the parts of a layer and of a message, with the names of the formulas."""

    def __init__(self, scenario: Scenario, tokens: float) -> None:
        (self.costs,) = PlacedScenario.of(scenario).layer_costs()
        self.scenario, self.tokens = scenario, np.array([tokens])
        self.beta = 1 / scenario.cluster.link.bandwidth_bytes_per_s
        self.alpha = scenario.cluster.link.latency_s

    @property
    def rest(self) -> float:
        """Seconds of projections, MLP, element-wise kernels, and of the copy of the chunk's K, V into the cache."""
        nothing = np.zeros(1)
        parts = self.costs.qkv_s(self.tokens), self.costs.output_mlp_s(self.tokens)
        return sum(map(number, parts)) + number(self.costs.mixer.append_s(self.tokens, nothing))

    @property
    def kv_bytes(self) -> float:
        return float(self.tokens[0]) * self.scenario.model.layer_cache_bytes(1, 2)

    @property
    def cast(self) -> float:
        """Seconds to cast the output to fp32 (2 bytes read, 4 written) or back."""
        return self._output_s(6.0)

    def merge(self, tokens: float | None = None, *, part: bool = False) -> float:
        """Seconds of a kernel that reads and writes fp32 output and log-sum-exp, and reads the results of a block."""
        spec = self.scenario.model
        queries = self.tokens if tokens is None else np.array([tokens])
        expected = self._output_s(10.0, queries) + self._output_s(12.0 / spec.head_dim, queries)
        assert number(self.costs.block_mixer.merge_s(queries, part=part)) == pytest.approx(expected)
        return expected

    def _output_s(self, element_bytes: float, tokens: Array | None = None) -> float:
        spec = self.scenario.model
        queries = number(self.tokens if tokens is None else tokens)
        elements = queries * spec.num_attention_heads * spec.head_dim
        return elements * element_bytes / self.scenario.cluster.gpu.hbm_bytes_per_s

    def attention(self, start: float, tokens: float | None = None) -> float:
        queries = self.tokens if tokens is None else np.array([tokens])
        return number(self.costs.mixer.attention_s(queries, np.array([start])))


def around(scenario: Scenario, tokens: float) -> float:
    """Seconds of embedding and head."""
    program = build_program(executed(scenario, get_strategy("kvr-e")), [np.array([tokens])] * scenario.cluster.num_gpus)
    return sum(number(op.device_s) for op in (*program.prologue[-1], *program.epilogue[-1]) if isinstance(op, Compute))


@pytest.mark.parametrize("bandwidth", LINKS)
@pytest.mark.parametrize(("model", "gpus", "ctx"), SHAPES[:3])
def test_ring_attention(model: str, gpus: int, ctx: int, bandwidth: str) -> None:
    """Liu et al. (2023): a round takes the maximum of a block's attention and the transfer of its K and V.

    The last rank has work in every round; a pair of query and key in the p - 1 earlier blocks takes 4 h d FLOPs.
    """
    scenario = scenario_of(model, gpus, ctx, bandwidth)
    chunk = ctx // gpus
    layer = Layer(scenario, chunk)
    flops = 4 * scenario.model.num_attention_heads * scenario.model.head_dim * chunk * chunk
    block = flops / scenario.cluster.gpu.peak_flops["fp16"] + layer.merge()
    sent = layer.alpha + layer.kv_bytes * layer.beta
    rounds = max(layer.attention(0.0) + layer.cast, sent) + (gpus - 2) * max(block, sent) + block + layer.cast
    expected = around(scenario, chunk) + scenario.model.num_hidden_layers * (layer.rest + rounds)
    assert run_simulation(scenario, strategy="ring").ttft_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bandwidth", LINKS)
@pytest.mark.parametrize(("model", "gpus", "ctx"), SHAPES[:3])
def test_striped_attention(model: str, gpus: int, ctx: int, bandwidth: str) -> None:
    """Brandon et al. (2023): every round is a causal half, which takes half of the ring's attention with fast links.

    Ranks before the owner of a stripe have one query that sees no key of it, so they merge into a part of their rows.
    """
    scenario = scenario_of(model, gpus, ctx, bandwidth)
    chunk = ctx // gpus
    layer = Layer(scenario, chunk)
    half = layer.attention(0.0)
    merged = half + layer.merge()
    assert layer.merge() == layer.merge(part=True), "one kernel writes where it reads"
    sent = layer.alpha + layer.kv_bytes * layer.beta
    rounds = max(half + layer.cast, sent) + (gpus - 2) * max(merged, sent) + merged + layer.cast
    expected = around(scenario, chunk) + scenario.model.num_hidden_layers * (layer.rest + rounds)
    assert run_simulation(scenario, strategy="striped").ttft_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bandwidth", LINKS)
@pytest.mark.parametrize(("model", "gpus", "ctx"), SHAPES[:3])
def test_zigzag_ring(model: str, gpus: int, ctx: int, bandwidth: str) -> None:
    """ring-flash-attention: half a block per round; the first rank merges all rows, the last rank half of them.

    A rank waits for the previous rank's pieces and for the next rank to receive, so the slower half determines the
    time.
    """
    scenario = scenario_of(model, gpus, ctx, bandwidth)
    chunk = ctx // gpus
    layer = Layer(scenario, chunk)
    flops = 2 * scenario.model.num_attention_heads * scenario.model.head_dim * chunk * chunk
    half = flops / scenario.cluster.gpu.peak_flops["fp16"]
    sent = layer.alpha + layer.kv_bytes * layer.beta
    least = max(layer.attention(0.0) + layer.cast, sent) + layer.cast
    most = least + (gpus - 1) * max(half + layer.merge(), sent)
    least += (gpus - 2) * max(half + layer.merge(chunk / 2), sent) + half + layer.merge(chunk / 2)
    ttft_s = run_simulation(scenario, strategy="zigzag-ring").ttft_s
    per_layer = (ttft_s - around(scenario, chunk)) / scenario.model.num_hidden_layers - layer.rest
    assert least * (1 - 1e-9) <= per_layer <= most * (1 + 1e-9)


@pytest.mark.parametrize("bandwidth", LINKS)
@pytest.mark.parametrize(("model", "gpus", "ctx"), SHAPES[:3])
def test_zigzag(model: str, gpus: int, ctx: int, bandwidth: str) -> None:
    """Llama 3 (2024), 3.3.2: an all-gather of (p - 1) steps, then 1 / p of the causal attention on every rank."""
    scenario = scenario_of(model, gpus, ctx, bandwidth)
    chunk, piece = ctx // gpus, ctx // gpus / 2
    layer = Layer(scenario, chunk)
    gathered = (gpus - 1) * (layer.alpha + layer.kv_bytes * layer.beta)
    attention = layer.attention(0.0, piece) + layer.attention(ctx - piece, piece)
    flops = 4 * scenario.model.num_attention_heads * scenario.model.head_dim * ctx * ctx / 2
    assert attention == pytest.approx(flops / scenario.cluster.gpu.peak_flops["fp16"] / gpus, rel=1e-9)
    expected = around(scenario, chunk) + scenario.model.num_hidden_layers * (layer.rest + gathered + attention)
    assert run_simulation(scenario, strategy="zigzag").ttft_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bandwidth", LINKS)
@pytest.mark.parametrize(("model", "gpus", "ctx"), SHAPES)
def test_tensor_parallel(model: str, gpus: int, ctx: int, bandwidth: str) -> None:
    """Shoeybi et al. (2019): two all-reduces of tokens x hidden per layer, each a ring of 2 (p - 1) steps.

    A GPU computes 1 / p of the FLOPs, or reads 1 / p of the weights if this takes longer, and has 1 / p of the heads.
    """
    scenario = scenario_of(model, gpus, ctx, bandwidth)
    spec, gpu, link = scenario.model, scenario.cluster.gpu, scenario.cluster.link
    peak, hidden = gpu.peak_flops["fp16"], ctx * spec.hidden_size * 2
    all_reduce = 2 * (gpus - 1) * (link.latency_s + hidden / gpus / link.bandwidth_bytes_per_s)
    seconds = all_reduce + _around_tensor_parallel(scenario)
    for kind in spec.layers:
        matrices = (*kind.mixer.projections, *kind.mixer.output, *kind.mlp)
        weights = sum(part.in_features * part.out_features for part in matrices) / gpus
        seen = min(ctx, kind.mixer.sliding_window or ctx)
        pairs = seen * seen / 2 + (ctx - seen) * seen
        seconds += 2 * ctx * weights / peak + 4 * spec.num_attention_heads / gpus * spec.head_dim * pairs / peak
        heads = (spec.num_attention_heads + spec.num_key_value_heads) / gpus * spec.head_dim
        elementwise = (
            4 * spec.hidden_size * 2 + 4 * heads + 2 * 6 * spec.hidden_size + 6 * spec.intermediate_size / gpus
        )
        seconds += ctx * elementwise / gpu.hbm_bytes_per_s + 2 * all_reduce
    result = run_simulation(scenario, strategy="tp")
    assert result.ttft_s == pytest.approx(seconds, rel=1e-9)
    assert len(result.per_rank) == gpus
    sent = 2 * (gpus - 1) / gpus * hidden * (2 * spec.num_hidden_layers + 1)
    logits = (gpus - 1) / gpus * spec.vocab_size * 2
    assert [rank.sent_bytes for rank in result.per_rank] == pytest.approx([sent + logits] * gpus, rel=1e-12)


def _around_tensor_parallel(scenario: Scenario) -> float:
    """Seconds to read and write the embedding, to read the head's rows, and to gather the logits."""
    spec, gpu, link, gpus = scenario.model, scenario.cluster.gpu, scenario.cluster.link, scenario.cluster.num_gpus
    embedding = scenario.request.new_tokens * 4 * spec.hidden_size / gpu.hbm_bytes_per_s
    head = spec.hidden_size * spec.vocab_size / gpus * 2 / gpu.hbm_bytes_per_s
    logits = (gpus - 1) * (link.latency_s + spec.vocab_size * 2 / gpus / link.bandwidth_bytes_per_s)
    return embedding + head + logits


def test_ulysses() -> None:
    """Jacobs et al. (2023): each rank sends 1 / p of Q, K, V and output to every other rank and has 1 / p of heads."""
    scenario = scenario_of("llama-2-7b", 4, 8192, "10GB/s")
    layer = Layer(scenario, 2048)
    spec, gpus = scenario.model, 4
    piece = 2048 * spec.num_attention_heads // gpus * spec.head_dim * 2
    exchanged = 2 * layer.alpha + (gpus - 1) * (3 + 1) * piece * layer.beta
    flops = 4 * spec.num_attention_heads / gpus * spec.head_dim * 8192 * 8192 / 2
    attention = flops / scenario.cluster.gpu.peak_flops["fp16"]
    expected = around(scenario, 2048) + spec.num_hidden_layers * (layer.rest + exchanged + attention)
    assert run_simulation(scenario, strategy="ulysses").ttft_s == pytest.approx(expected, rel=1e-9)


def test_kvr_direct_sends_as_much_as_the_chain_receives() -> None:
    """Each rank sends its K and V once to every later rank: p (p - 1) / 2 chunks, the same number as in the chain."""
    scenario = scenario_of("llama-2-7b", 4, 8192, "300GB/s")
    chain, direct = (
        run_simulation(scenario, strategy=name, search=Search(partition=[2048] * 4)) for name in ("kvr-s", "kvr-direct")
    )
    sent = [sum(rank.sent_bytes for rank in result.per_rank) for result in (chain, direct)]
    assert sent[0] == sent[1] == 6 * 2048 * scenario.model.kv_bytes_per_token(2)
    assert direct.ttft_s <= chain.ttft_s


@pytest.mark.parametrize(("stages", "context", "pieces"), [(2, 1, 4), (4, 1, 16), (8, 1, 1), (2, 4, 4), (4, 2, 8)])
def test_pipeline(stages: int, context: int, pieces: int) -> None:
    """TTFT: all pieces on the first stage, then the last and longest one on the others, and the messages between them.

    Context ranks have an early and a late part of each piece, and gather K and V of this piece only.
    """
    ctx, name = 8192, f"pp{stages}+cp{context}"
    scenario = scenario_of("llama-2-7b", stages * context, ctx, "300GB/s")
    piece, chunk, part = ctx // pieces, ctx // pieces // context, ctx / pieces / context / 2
    layer = Layer(scenario, chunk)
    layers = scenario.model.num_hidden_layers // stages
    gathered = (context - 1) * (layer.alpha + layer.kv_bytes * layer.beta)
    starts = [index * piece for index in range(pieces)]
    attention = [layer.attention(start, part) + layer.attention(start + piece - part, part) for start in starts]
    each = [layers * (layer.rest + gathered + attended) for attended in attention]
    sent = layer.alpha + chunk * scenario.model.hidden_size * 2 * layer.beta
    embedding = ctx / context * 4 * scenario.model.hidden_size / scenario.cluster.gpu.hbm_bytes_per_s
    head = around(scenario, chunk) - embedding / pieces
    expected = embedding + sum(each) + (stages - 1) * (each[-1] + sent) + head
    result = run_simulation(scenario, strategy=name, search=Search(partition=[piece] * pieces))
    assert result.ttft_s == pytest.approx(expected, rel=1e-9)
    assert [rank.chunk_len for rank in result.per_rank] == [ctx // context] * stages * context
    kv_bytes = 2 * pieces * layers * layer.kv_bytes * (context - 1)
    activations = ctx // context * scenario.model.hidden_size * 2
    assert [rank.sent_bytes for rank in result.per_rank] == pytest.approx(
        [kv_bytes / 2 + activations] * (stages - 1) * context + [kv_bytes / 2] * context, rel=1e-12
    )


@pytest.mark.parametrize("size", [2, 3, 8])
def test_an_all_reduce_takes_what_two_simulated_rings_take(size: int) -> None:
    """The closed form equals a reduce-scatter and an all-gather, simulated step by step by both executors."""
    scenario = scenario_of("llama-2-7b", size, 4096, "50GB/s")
    nbytes = np.array([3e8])
    ring = AllGather(nbytes=nbytes / size)
    ops: Any = ((ring, ring),) * size
    program = Program(
        strategy="rings", prologue=((),) * size, layers=(ops,), layer_kind_index=(0,), epilogue=((),) * size
    )
    expected = number(group_of(scenario.cluster, size, scenario.model).all_reduce_s(nbytes))
    assert run_batch(program, scenario.cluster)[:, 0] == pytest.approx([expected] * size, rel=1e-12)
    assert EventSimulation(program, scenario.cluster).finish_s == pytest.approx([expected] * size, rel=1e-12)


def test_an_all_reduce_over_nodes_uses_every_gpus_network() -> None:
    """The steps are a reduce-scatter inside nodes, an all-reduce of 1/8 of the bytes across, an all-gather inside."""
    scenario, _ = kvrsim.make_scenario(
        ctx="8k", gpus=16, model="llama-3-70b", cluster="h100-2x8-ndr400", profile="roofline"
    )
    cluster = scenario.cluster
    assert cluster.network is not None
    nbytes = np.array([1e9])
    inside = 7 * (cluster.link.latency_s + 1e9 / 8 / cluster.link.bandwidth_bytes_per_s)
    across = cluster.network.latency_s + 1e9 / 16 / cluster.network.bandwidth_bytes_per_s
    expected = 2 * (inside + across)
    assert number(group_of(cluster, 16, scenario.model).all_reduce_s(nbytes)) == pytest.approx(expected, rel=1e-12)
