"""Scope: what the steps run on, and how long they may take."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvrsim.units import parse_tokens

if TYPE_CHECKING:
    from calibrate.measure.forward import ComputeSetup

# Small enough for two busy cores, large enough that its products take longer than what disturbs them.
TINY = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
}


@dataclass(frozen=True, kw_only=True)
class Scope:
    """One machine, and how much of it is tried."""

    folder: str  # where the report and what the steps write go
    num_gpus: int  # of this machine; 0: it has none, the CPU computes
    quick: bool = False  # as short as it can be: whether the steps run, not how fast

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU."""
        return self.num_gpus > 0

    @property
    def device(self) -> str:
        """As kvrsim's --device."""
        return "cuda" if self.on_gpu else "cpu"

    @property
    def dtype(self) -> str:
        """Of all that is measured."""
        return "fp16" if self.on_gpu else "fp32"

    @property
    def most_ranks(self) -> int:
        """That the steps run together: the GPUs, of which the runtime's plans use up to 8; on a CPU two."""
        return min(self.num_gpus, 8) if self.on_gpu else 2

    @property
    def ctx(self) -> str:
        """Context of the steps that compare strategies."""
        return "4k" if self.on_gpu else "256"

    @property
    def long_ctx(self) -> str:
        """Of the step about long contexts."""
        if self.on_gpu:
            return "128k"
        return "1k" if self.quick else "4k"

    @property
    def model(self) -> str:
        """Name or path: a tiny one on a CPU."""
        return "llama-7b" if self.on_gpu else str(self._tiny)

    @property
    def long_model(self) -> str:
        """That is made for the long context."""
        return "llama-3-8b" if self.on_gpu else str(self._tiny)

    @property
    def attentions(self) -> tuple[str, ...]:
        """Kernels, in the order of the profile's default."""
        return ("flash", "sdpa", "eager")

    @cached_property
    def _tiny(self) -> Path:
        path = Path(self.folder, "tiny.json")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(TINY), encoding="utf-8")
        return path

    @property
    def profile(self) -> Path:
        """That the step `calibrate` writes."""
        return Path(self.folder, "mine.json")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


# -- step: one thing that is tried in a process of its own, what it must show, and what to do if it does not

Status = Literal["passed", "failed", "skipped", "timed out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a step has found."""

    status: Status
    lines: Sequence[str]  # for people
    facts: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"status": self.status, "lines": list(self.lines), "facts": dict(self.facts)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step."""

    name: str  # as --steps has it
    title: str
    must_show: str
    otherwise: str  # what to do
    run: Callable[[Scope], Finding]
    timeout_s: float  # on a GPU; a CPU's steps are small and get as long
    applies: Callable[[Scope], str | None] = lambda scope: None  # why it does not apply; None: it does


def finding_of(lines: Sequence[str], faults: Sequence[str], facts: Mapping[str, Any]) -> Finding:
    """Passed where nothing is wrong; what is wrong comes first."""
    return Finding(status="failed" if faults else "passed", lines=[*faults, *lines], facts=facts)


def kvrsim(*words: object, accepted: Sequence[int] = (0,)) -> dict[str, Any]:
    """A kvrsim command's JSON object.

    Raises RuntimeError with the last line that it said where its exit code is not accepted or it prints none.
    """
    command = [sys.executable, "-m", "kvrsim", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in accepted:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
        raise RuntimeError(f"kvrsim {words[0]} ended with {done.returncode}: {said[-1].strip()}")
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"kvrsim {words[0]} printed no JSON") from None
    return found


# -- the checks that the steps of `make gpu` run: each measures something and returns a Finding

START_S = 60.0  # in which the ranks must have started, libraries imported, and used every link once
_STRATEGIES = ("single", "tsp", "kvr-e", "kvr-s")  # that the runtime runs and that need no table
_LOGITS = {"fp16": 2e-2, "bf16": 1e-1, "fp32": 1e-3}  # of the largest logit
_PRODUCT = (4096, 4096, 12288)  # the query, key and value projection of a 7B model on 4096 tokens
MOST_LOST = 0.15  # of a layer's rate beside a pending receive, with the runtime's limit on NCCL's blocks
MOST_ERROR = 0.10  # median, of predicted TTFTs
_UNSTEADY = ("repeatable measurements", "the machine is busy")  # in the message of a machine that is not idle


# -- the machine
def environment(scope: Scope) -> Finding:
    """Driver, clocks, power, topology, other processes."""
    from calibrate.measure import probes

    facts = probes.environment()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines, faults = [f"{facts['device']}; {facts['num_gpus']} GPUs", versions], []
    if not scope.on_gpu:
        return finding_of(["No GPU is available: the steps below run on the CPU.", *lines], [], facts)
    queries = {
        "gpus": "--query-gpu=index,name,persistence_mode,pstate,clocks.sm,clocks.max.sm,power.draw,power.limit,"
        "power.default_limit",
        "processes": "--query-compute-apps=gpu_uuid,pid,used_memory",
    }
    told = {name: _smi(query, "--format=csv,noheader") for name, query in queries.items()}
    told["topology"] = _smi("topo", "-m")
    lines += [line for text in told.values() for line in text.splitlines()]
    for row in told["gpus"].splitlines():
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) == 9 and cells[2] == "Disabled":
            faults.append(f"GPU {cells[0]}: persistence mode is off")
        if len(cells) == 9 and cells[7] != cells[8]:
            faults.append(f"GPU {cells[0]}: its power limit is {cells[7]}, by default {cells[8]}")
    if told["processes"].strip():
        faults.append("other processes use the GPUs")
    return finding_of(lines, faults, facts | {"nvidia-smi": told})


def transport(scope: Scope) -> Finding:
    """The runtime's transport on two ranks, then on all."""
    from calibrate.measure import probes

    found = [probes.ring(ranks, scope.device, 60.0) for ranks in sorted({2, scope.most_ranks})]
    lines = [
        f"{one['num_ranks']} ranks over {one['transport']}: start and first messages {one['total_s']:.1f} s, then "
        f"1 MiB round the ring in {1e3 * one['message_s']:.2f} ms"
        for one in found
    ]
    faults = [f"{one['num_ranks']} ranks: what arrived is wrong" for one in found if not one["right"]]
    if scope.on_gpu:
        faults += [f"{one['num_ranks']} ranks are not linked by NCCL" for one in found if one["transport"] != "nccl"]
        faults += [f"the start took {one['total_s']:.0f} s" for one in found if one["total_s"] > START_S]
    return finding_of(lines, faults, {"rings": found})


def logits(scope: Scope) -> Finding:
    """Each strategy that the runtime runs against one process, on two ranks and on all."""
    lines: list[str] = []
    faults: list[str] = []
    facts: dict[str, Any] = {}
    for strategy in _STRATEGIES:
        for gpus in (1,) if strategy == "single" else sorted({2, scope.most_ranks} - {1}):
            kernel = "sdpa" if strategy == "tsp" else "flash"
            words = ["--strategy", strategy, "--gpus", gpus, "--attention", kernel, "--profile", "roofline", "--check"]
            if strategy == "kvr-s":  # uneven chunks, as a search finds them
                words += ["--partition", _uneven(parse_tokens(scope.ctx, "ctx"), gpus)]
            name = f"{strategy} on {gpus}"
            try:
                found = kvrsim("run", *words, "--repeats", 1, *_common(scope))
            except RuntimeError as error:
                faults.append(f"{name}: {error}")
                continue
            share = found["max_logit_error"] / found["largest_logit"]
            seconds = found["measured_ttft_s"]
            lines.append(f"{name}: logits differ by {share:.1e} of the largest, TTFT {1e3 * seconds:.1f} ms")
            facts[name] = {"logit_error": share, "measured_ttft_s": seconds}
            if not share <= _LOGITS[scope.dtype]:
                faults.append(f"{name}: logits differ by {share:.1e} of the largest, accepted {_LOGITS[scope.dtype]}")
    return finding_of(lines, faults, facts)


def _uneven(tokens: int, ranks: int) -> str:
    """Chunks that shrink towards the last rank, as those of a chain do."""
    weights = [ranks + 2 - rank for rank in range(ranks)]
    chunks = [tokens * weight // sum(weights) for weight in weights]
    chunks[0] += tokens - sum(chunks)
    return ",".join(map(str, chunks))


def kernels(scope: Scope) -> Finding:
    """What attention runs, by the profiler."""
    from calibrate.measure import probes

    chunk, prefix = (4096, 4096) if scope.on_gpu else (64, 64)
    setup = _setup(scope, scope.ctx if not scope.on_gpu else "8k")
    found = {place: probes.kernel_names(setup, chunk, before) for place, before in (("alone", 0), ("prefix", prefix))}
    lines = [f"{kernel}, {place}: {', '.join(names)}" for place, of in found.items() for kernel, names in of.items()]
    faults = []
    for place, of in found.items():
        if not any("flash" in name.lower() for name in of["flash"]):
            faults.append(f"flash, {place}: no kernel of that name")
        if any(name == "aten::item" for name in of["flash"]):
            faults.append(f"flash, {place}: aten::item waits for the device")
    return finding_of(lines, faults, found)


def clock(scope: Scope) -> Finding:
    """One product for 20 ms and for 2 s."""
    from calibrate.measure import probes

    shape = _PRODUCT if scope.on_gpu else (256, 256, 256)
    durations_s = (0.02, 0.1 if scope.quick else 2.0)
    short, long = probes.products(scope.device, scope.dtype, durations_s, shape)
    ratio = long["flops_per_s"] / short["flops_per_s"]
    lines = [f"{one['seconds']:.3f} s: {one['flops_per_s'] / 1e12:.3g} TFLOP/s{_state(one)}" for one in (short, long)]
    lines.append(f"ratio {ratio:.2f}: rate of a long run divided by the rate of a short burst")
    faults = [f"the clock falls to {ratio:.0%} in 2 s"] if scope.on_gpu and ratio < 0.75 else []
    return finding_of(lines, faults, {"short": short, "long": long, "ratio": ratio})


def pending(scope: Scope) -> Finding:
    """A layer alone, and beside a receive that waits."""
    from calibrate.measure import probes

    chunks = (512, 2048) if scope.on_gpu else (64,)
    found = probes.beside_receive(_setup(scope, "4k" if scope.on_gpu else "256"), chunks, 1 if scope.quick else 5)
    lines = [
        f"{one['chunk']} tokens: {1e3 * one['alone_s']:.3f} ms alone, {1e3 * one['pending_s']:.3f} ms beside a pending "
        f"receive: {one['lost']:.1%} of its rate lost"
        for one in found
    ]
    lost = [one for one in found if one["lost"] > MOST_LOST] if scope.on_gpu else []
    faults = [f"{one['chunk']} tokens: {one['lost']:.0%} of the rate is lost" for one in lost]
    return finding_of(lines, faults, {"chunks": found})


# -- calibration
def links(scope: Scope) -> Finding:
    """Messages and all-gathers between all ranks."""
    output = Path(scope.folder, "links.csv")
    words = ["--ranks", scope.most_ranks, "--device", scope.device, "--minutes", 0.1 if scope.quick else 1]
    if scope.quick or not scope.on_gpu:
        words += ["--max-bytes", "1MiB"]
    found = kvrsim("calibrate", "links", "-o", output, "--even-if-busy", *words)
    from calibrate.data import read_measurements

    rows = [
        row for row in read_measurements(output) if row.operation == "send_recv" and row.bytes and row.messages == 1
    ]
    longest, shortest = (kind(row.bytes or 0 for row in rows) for kind in (max, min))
    rates = [(row.bytes or 0) / row.median_s for row in rows if row.bytes == longest]
    short_s = [row.median_s for row in rows if row.bytes == shortest]
    lines = [
        f"{longest} bytes: {min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f} GB/s one way; {shortest} bytes: "
        f"{1e6 * min(short_s):.0f} to {1e6 * max(short_s):.0f} us"
    ]
    uneven = scope.on_gpu and max(rates) > 2 * min(rates)
    return finding_of(lines, ["pairs differ more than twofold"] if uneven else [], found)


def calibrate(scope: Scope) -> Finding:
    """A profile of this machine."""
    words = ["--model", scope.model, "--device", scope.device, "--minutes", 0.3 if scope.quick else _minutes(scope)]
    if not scope.on_gpu:
        words += ["--ctx", "1k", "--ranks", scope.most_ranks, "--attention", "sdpa", "--even-if-busy"]
    try:
        found = kvrsim("calibrate", "all", "-o", scope.profile, *words)
    except RuntimeError as error:
        if scope.on_gpu or not any(word in str(error) for word in _UNSTEADY):
            raise
        return Finding(status="skipped", lines=[f"this CPU is not steady enough to be calibrated: {error}"])
    profile = json.loads(scope.profile.read_text("utf-8"))
    state = profile["provenance"].get("measured: device_state", "not known")
    lines = [f"{kind}: mean error {fit['mape']:.1%}" for kind, fit in profile["operations"].items()]
    lines.append(f"lost beside a pending receive: {profile['links']['pending_share']:.1%}")
    lines.append(f"clock and power: {state}")
    return finding_of(lines, [], found if isinstance(found, Mapping) else {})


def confirm(scope: Scope, gpus: int) -> Finding:
    """Plan with that profile, measure the candidates."""
    if not scope.profile.exists():
        return Finding(status="skipped", lines=["`calibrate` has left no profile"])
    words = ["--gpus", gpus, "--profile", scope.profile, "--model", scope.model, "--device", scope.device]
    words += [
        "--ctx",
        "16k" if scope.on_gpu and gpus > 1 else scope.ctx,
        "--top",
        1,
        "--repeats",
        2 if scope.quick else 5,
    ]
    found = kvrsim("confirm", *words, accepted=(0, 1))
    errors = sorted(abs(one["rel_error"]) for one in found["candidates"])
    middle = errors[len(errors) // 2]
    lines = [
        f"{one['strategy']} {one['partition']}: predicted {1e3 * one['predicted_ttft_s']:.1f} ms, measured "
        f"{1e3 * one['measured_ttft_s']:.1f} ms ({one['rel_error']:+.1%})"
        for one in found["candidates"]
    ]
    lines.append(f"median error {middle:.1%}, regret {found['regret']:+.1%}")
    faults = [f"median error {middle:.1%}"] if scope.on_gpu and middle > MOST_ERROR else []
    if scope.on_gpu and not found["ok"]:
        faults.append("confirm's own checks were not met (`ok` is false)")
    if not scope.on_gpu:
        lines.append("Not judged: a tiny model on a CPU that others may use.")
    return finding_of(lines, faults, {key: found[key] for key in ("candidates", "regret", "max_logit_error", "ok")})


def long_context(scope: Scope) -> Finding:
    """One prefill as long as a model allows, on one device."""
    words = ["--strategy", "single", "--gpus", 1, "--ctx", scope.long_ctx, "--model", scope.long_model]
    words += ["--attention", "flash", "--repeats", 1, "--device", scope.device, "--dtype", scope.dtype]
    found = kvrsim("run", *words, "--profile", "roofline", "--timeout", "1200s")
    return finding_of([f"{scope.long_ctx} tokens: first token after {found['measured_ttft_s']:.2f} s"], [], found)


# -- helpers
def too_many_gpus(scope: Scope, gpus: int) -> str | None:
    there = scope.num_gpus if scope.on_gpu else 2
    if gpus > there:
        return f"{there} GPUs are here" if scope.on_gpu else "two ranks share the CPU, more would say nothing"
    return None


def one_gpu(scope: Scope) -> str | None:
    return "one GPU is here: messages need two" if scope.on_gpu and scope.num_gpus < 2 else None


def _minutes(scope: Scope) -> float:
    return 10 if scope.on_gpu else 0.5


def _common(scope: Scope) -> Iterator[object]:
    yield from ("--ctx", scope.ctx, "--model", scope.model, "--device", scope.device, "--dtype", scope.dtype)


def _setup(scope: Scope, ctx: str) -> ComputeSetup:
    from calibrate.measure.forward import ComputeSetup
    from kvrsim.io.schema import JsonObject
    from kvrsim.model.load import config_path, load_model

    config = JsonObject.read(config_path(scope.model, "model"), "model").fields
    return ComputeSetup(
        model=load_model(scope.model),
        config={key: value for key, value in config.items() if not key.startswith("_")},
        device=scope.device,
        dtype=scope.dtype,
        kernels=scope.attentions,
        max_context=parse_tokens(ctx, "ctx"),
        threads=1,
    )


def _state(one: Mapping[str, Any]) -> str:
    """Clock and power, where NVML tells."""
    found = one["at_the_end"]
    if not found or found["sm_clock_hz"] is None:
        return ""
    power = "" if found["power_w"] is None else f", {found['power_w']:.0f} W"
    reasons = f", limited by {', '.join(found['throttled'])}" if found["throttled"] else ""
    return f" at {found['sm_clock_hz'] / 1e6:.0f} MHz{power}{reasons}"


def _smi(*words: str) -> str:
    """What nvidia-smi prints; nothing where it does not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *words], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# -- the steps of the first hour on a GPU node, in their order: what each must show, and what to do otherwise


def steps() -> tuple[Step, ...]:
    """All of them."""
    confirms = (
        Step(
            name=f"confirm-{gpus}",
            title=f"Plan and measure on {gpus} GPU{'s' if gpus > 1 else ''}",
            must_show="`ok`: logits equal, no faster candidate; median error of predicted TTFTs at most "
            f"{MOST_ERROR:.0%}",
            otherwise="a predicted TTFT too short on 1 GPU: it is slower than during calibration, see `clock`; errors "
            "that grow with the ranks: see `pending` and `links`; a time-out: see `transport`",
            run=partial(confirm, gpus=gpus),
            timeout_s=900,
            applies=partial(too_many_gpus, gpus=gpus),
        )
        for gpus in (1, 2, 4, 8)
    )
    return (*_BEFORE, *confirms, *_AFTER)


_BEFORE = (
    Step(
        name="environment",
        title="Environment",
        must_show="persistence mode on, the default power limit, no other process on the GPUs, NV# between all GPUs",
        otherwise="`nvidia-smi -pm 1`; `nvidia-smi -pl` with the default limit; end the other processes; PIX, PHB or "
        "SYS between GPUs: messages cross PCIe, calibrate the links and do not take a datasheet's",
        run=environment,
        timeout_s=120,
    ),
    Step(
        name="transport",
        title="Transport alone",
        must_show=f"ranks start and use every link within {START_S:.0f} s, over nccl; messages arrive intact",
        otherwise="a time-out: set NCCL_DEBUG=INFO and look at the last line of each rank; "
        "gloo instead of nccl: the ranks do not have a GPU each",
        run=transport,
        timeout_s=300,
        applies=one_gpu,
    ),
    Step(
        name="logits",
        title="Logits against one process",
        must_show="for each strategy that the runtime runs the logits of one process, to the dtype's precision",
        otherwise="only tsp differs: its mask; all differ: the attention kernel, see `kernels`, and try "
        "--attention eager",
        run=logits,
        timeout_s=900,
    ),
    Step(
        name="kernels",
        title="Kernels by the profiler",
        must_show="a flash kernel for `flash` with and without a prefix (`flash_fwd` on A100; cuDNN for `sdpa` on "
        "H100), no aten::item inside layers",
        otherwise="efficient or math instead of flash: look at the dtype and the width of a head; aten::item: a "
        "mask is read on the host in each forward",
        run=kernels,
        timeout_s=300,
    ),
    Step(
        name="clock",
        title="A product for 20 ms and for 2 s",
        must_show="a ratio of about 0.85 to 1, power at the limit and sw_power_cap in the long one; no heat",
        otherwise="below 0.75 or hw_slowdown: cooling or power supply; calibration heats the GPU first, so a ratio of "
        "0.87 is no fault",
        run=clock,
        timeout_s=120,
    ),
    Step(
        name="pending",
        title="A layer alone and beside a pending receive",
        must_show=f"at most {MOST_LOST:.0%} of the rate lost",
        otherwise="set NCCL_MAX_P2P_NCHANNELS=4 and compare; what is left is measured by `calibrate` and used in plans",
        run=pending,
        timeout_s=400,
        applies=one_gpu,
    ),
    Step(
        name="links",
        title="Links",
        must_show="long messages at about 80 % of the datasheet, short ones in 20 to 40 us, all pairs alike",
        otherwise="far less: peer-to-peer access is off (`nvidia-smi topo -p2p r`), or IOMMU or ACS is on",
        run=links,
        timeout_s=400,
        applies=one_gpu,
    ),
    Step(
        name="calibrate",
        title="Calibration",
        must_show="a profile, whose operations are fitted within a few per cent",
        otherwise="busy or hot: the message says by what; a large error of one operation: see its rows in "
        "mine.compute.csv",
        run=calibrate,
        timeout_s=1800,
    ),
)
_AFTER = (
    Step(
        name="long-context",
        title="Long context",
        must_show="a first token; no memory error of host or device",
        otherwise="out of the device's memory: a smaller --ctx; of the host's: look at the attention kernel",
        run=long_context,
        timeout_s=1500,
    ),
)
