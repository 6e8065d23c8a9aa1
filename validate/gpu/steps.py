"""The steps of the first hour on a GPU node: what each checks, must show, and what to do otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any, Literal

from kvrsim.units import parse_tokens

if TYPE_CHECKING:
    from calibrate.measure.forward import ComputeSetup

# Small enough for two busy cores; its products take longer than the disturbances of a busy machine.
TINY = Path(__file__).parents[1] / "models" / "tiny.json"


@dataclass(frozen=True, kw_only=True)
class Scope:
    """One machine, and the sizes of what the steps run on it."""

    folder: str  # of the report and of the files of the steps
    num_gpus: int  # of this machine; 0: the steps run on the CPU
    quick: bool = False  # checks only whether the steps run

    @property
    def on_gpu(self) -> bool:
        """Whether the steps run on a GPU."""
        return self.num_gpus > 0

    @property
    def device(self) -> str:
        """As kvrsim's --device."""
        return "cuda" if self.on_gpu else "cpu"

    @property
    def dtype(self) -> str:
        """Of all measurements."""
        return "fp16" if self.on_gpu else "fp32"

    @property
    def most_ranks(self) -> int:
        """Most ranks of a step: one per GPU, but at most 8; two on a CPU."""
        return min(self.num_gpus, 8) if self.on_gpu else 2

    @property
    def ctx(self) -> str:
        """Context of the steps that compare strategies."""
        return "4k" if self.on_gpu else "256"

    @property
    def long_ctx(self) -> str:
        """Context of the step about long contexts."""
        if self.on_gpu:
            return "128k"
        return "1k" if self.quick else "4k"

    @property
    def model(self) -> str:
        """Name or path: a tiny one on a CPU."""
        return "llama-7b" if self.on_gpu else str(TINY)

    @property
    def long_model(self) -> str:
        """A model for the long context."""
        return "llama-3-8b" if self.on_gpu else str(TINY)

    @property
    def calibration_minutes(self) -> float:
        """Time for the step `calibrate`."""
        if self.quick:
            return 0.3
        return 10 if self.on_gpu else 0.5

    @property
    def profile(self) -> Path:
        """The file that the step `calibrate` writes."""
        return Path(self.folder, "mine.json")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


Status = Literal["passed", "failed", "skipped", "timed out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of a step."""

    status: Status
    lines: Sequence[str]  # for people
    facts: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"status": self.status, "lines": list(self.lines), "facts": dict(self.facts)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A check that runs in a process of its own, what it must show, and what to do if it does not."""

    name: str  # as in --steps
    title: str
    must_show: str
    otherwise: str  # what to do
    run: Callable[[Scope], Finding]
    timeout_s: float  # on a GPU; a CPU's steps are small and have the same time
    applies: Callable[[Scope], str | None] = lambda scope: None  # why the step is skipped; None: it runs


STEPS: list[Step] = []  # in the order of the first hour
_Check = Callable[["Scope"], Finding]


def step(**fields: Any) -> Callable[[_Check], _Check]:
    """Decorator that adds a function to STEPS under its name; `fields`: those of Step."""

    def register(check: _Check) -> _Check:
        STEPS.append(Step(name=check.__name__.replace("_", "-"), run=check, **fields))
        return check

    return register


def finding_of(lines: Sequence[str], faults: Sequence[str], facts: Mapping[str, Any]) -> Finding:
    """Passed if there are no faults; faults are the first lines."""
    return Finding(status="failed" if faults else "passed", lines=[*faults, *lines], facts=facts)


def kvrsim(*words: object, accepted: Sequence[int] = (0,)) -> dict[str, Any]:
    """A kvrsim command's JSON object.

    Raises RuntimeError with the last line of standard error if its exit code is not accepted or it prints no JSON.
    """
    command = [sys.executable, "-m", "kvrsim", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in accepted:
        last = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
        raise RuntimeError(f"kvrsim {words[0]} ended with {done.returncode}: {last[-1].strip()}")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"kvrsim {words[0]} printed no JSON") from None
    return answer


START_S = 60.0  # for the start of the ranks, the import of libraries and the first message on every link
_STRATEGIES = ("single", "tsp", "kvr-e", "kvr-s")  # of the runtime, without a lookup table
_LOGITS = {"fp16": 2e-2, "bf16": 1e-1, "fp32": 1e-3}  # differences by dtype, as a share of the largest logit
_PRODUCT = (4096, 4096, 12288)  # the query, key and value projection of a 7B model on 4096 tokens
MOST_LOST = 0.15  # of a layer's rate during a pending receive, with the runtime's limit on NCCL's blocks
MOST_ERROR = 0.10  # median, of predicted TTFTs
_UNSTEADY = ("repeatable measurements", "the machine is busy")  # in the message of a machine that is not idle


def too_many_gpus(scope: Scope, gpus: int) -> str | None:
    """Why a step on this number of GPUs is skipped."""
    available = scope.num_gpus if scope.on_gpu else 2
    if gpus <= available:
        return None
    return f"{available} GPUs are here" if scope.on_gpu else "two ranks share the CPU, more would say nothing"


def one_gpu(scope: Scope) -> str | None:
    """Why a step that sends messages is skipped."""
    return "one GPU is here: messages need two" if scope.on_gpu and scope.num_gpus < 2 else None


@step(
    title="Environment",
    must_show="persistence mode on, the default power limit, no other process on the GPUs, NV# between all GPUs",
    otherwise="`nvidia-smi -pm 1`; `nvidia-smi -pl` with the default limit; end the other processes; PIX, PHB or "
    "SYS between GPUs: messages cross PCIe, calibrate the links and do not take a datasheet's",
    timeout_s=120,
)
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
    output = {name: _smi(query, "--format=csv,noheader") for name, query in queries.items()}
    output["topology"] = _smi("topo", "-m")
    lines += [line for text in output.values() for line in text.splitlines()]
    for row in output["gpus"].splitlines():
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) != 9:
            continue
        if cells[2] == "Disabled":
            faults.append(f"GPU {cells[0]}: persistence mode is off")
        if cells[7] != cells[8]:
            faults.append(f"GPU {cells[0]}: its power limit is {cells[7]}, by default {cells[8]}")
    if output["processes"].strip():
        faults.append("other processes use the GPUs")
    return finding_of(lines, faults, facts | {"nvidia-smi": output})


@step(
    title="Transport alone",
    must_show=f"ranks start and use every link within {START_S:.0f} s, over nccl; messages arrive intact",
    otherwise="a time-out: set NCCL_DEBUG=INFO and look at the last line of each rank; "
    "gloo instead of nccl: the ranks do not have a GPU each",
    timeout_s=300,
    applies=one_gpu,
)
def transport(scope: Scope) -> Finding:
    """The runtime's transport on two ranks, then on all."""
    from calibrate.measure import probes

    rings = [probes.ring(ranks, scope.device, 60.0) for ranks in sorted({2, scope.most_ranks})]
    lines = [
        f"{one['num_ranks']} ranks over {one['transport']}: start and first messages {one['total_s']:.1f} s, then "
        f"1 MiB round the ring in {1e3 * one['message_s']:.2f} ms"
        for one in rings
    ]
    faults = [f"{one['num_ranks']} ranks: what arrived is wrong" for one in rings if not one["right"]]
    if scope.on_gpu:
        faults += [f"{one['num_ranks']} ranks are not linked by NCCL" for one in rings if one["transport"] != "nccl"]
        faults += [f"the start took {one['total_s']:.0f} s" for one in rings if one["total_s"] > START_S]
    return finding_of(lines, faults, {"rings": rings})


@step(
    title="Logits against one process",
    must_show="for each strategy that the runtime runs the logits of one process, to the dtype's precision",
    otherwise="only tsp differs: its mask; all differ: the attention kernel, see `kernels`, and try --attention eager",
    timeout_s=900,
)
def logits(scope: Scope) -> Finding:
    """Each strategy that the runtime runs against one process, on two ranks and on all."""
    lines: list[str] = []
    faults: list[str] = []
    facts: dict[str, Any] = {}
    model = ("--ctx", scope.ctx, "--model", scope.model, "--device", scope.device, "--dtype", scope.dtype)
    for strategy in _STRATEGIES:
        for gpus in (1,) if strategy == "single" else sorted({2, scope.most_ranks} - {1}):
            kernel = "sdpa" if strategy == "tsp" else "flash"
            words = ["--strategy", strategy, "--gpus", gpus, "--attention", kernel, "--profile", "roofline", "--check"]
            if strategy == "kvr-s":  # uneven chunks
                words += ["--partition", _uneven(parse_tokens(scope.ctx, "ctx"), gpus)]
            name = f"{strategy} on {gpus}"
            try:
                answer = kvrsim("run", *words, "--repeats", 1, *model)
            except RuntimeError as error:
                faults.append(f"{name}: {error}")
                continue
            share = answer["max_logit_error"] / answer["largest_logit"]
            seconds = answer["measured_ttft_s"]
            lines.append(f"{name}: logits differ by {share:.1e} of the largest, TTFT {1e3 * seconds:.1f} ms")
            facts[name] = {"logit_error": share, "measured_ttft_s": seconds}
            if not share <= _LOGITS[scope.dtype]:
                faults.append(f"{name}: logits differ by {share:.1e} of the largest, accepted {_LOGITS[scope.dtype]}")
    return finding_of(lines, faults, facts)


def _uneven(tokens: int, ranks: int) -> str:
    """Chunks that shrink towards the last rank."""
    weights = [ranks + 2 - rank for rank in range(ranks)]
    chunks = [tokens * weight // sum(weights) for weight in weights]
    chunks[0] += tokens - sum(chunks)
    return ",".join(map(str, chunks))


@step(
    title="Kernels by the profiler",
    must_show="a flash kernel for `flash` with and without a prefix (`flash_fwd` on A100; cuDNN for `sdpa` on "
    "H100), no aten::item inside layers",
    otherwise="efficient or math instead of flash: look at the dtype and the width of a head; aten::item: a "
    "mask is read on the host in each forward",
    timeout_s=300,
)
def kernels(scope: Scope) -> Finding:
    """What attention runs, by the profiler."""
    from calibrate.measure import probes

    chunk, prefix = (4096, 4096) if scope.on_gpu else (64, 64)
    setup = _setup(scope, scope.ctx if not scope.on_gpu else "8k")
    names = {place: probes.kernel_names(setup, chunk, before) for place, before in (("alone", 0), ("prefix", prefix))}
    lines = [f"{kernel}, {place}: {', '.join(of[kernel])}" for place, of in names.items() for kernel in of]
    faults = []
    for place, of in names.items():
        if not any("flash" in name.lower() for name in of["flash"]):
            faults.append(f"flash, {place}: no kernel of that name")
        if "aten::item" in of["flash"]:
            faults.append(f"flash, {place}: aten::item waits for the device")
    return finding_of(lines, faults, names)


@step(
    title="A product for 20 ms and for 2 s",
    must_show="a ratio of about 0.85 to 1, power at the limit and sw_power_cap in the long one; no heat",
    otherwise="below 0.75 or hw_slowdown: cooling or power supply; calibration heats the GPU first, so a ratio of "
    "0.87 is no fault",
    timeout_s=120,
)
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


@step(
    title="A layer alone and beside a pending receive",
    must_show=f"at most {MOST_LOST:.0%} of the rate lost",
    otherwise="set NCCL_MAX_P2P_NCHANNELS=4 and compare; what is left is measured by `calibrate` and used in plans",
    timeout_s=400,
    applies=one_gpu,
)
def pending(scope: Scope) -> Finding:
    """A layer alone, and during a receive that waits."""
    from calibrate.measure import probes

    chunks = (512, 2048) if scope.on_gpu else (64,)
    rates = probes.beside_receive(_setup(scope, "4k" if scope.on_gpu else "256"), chunks, 1 if scope.quick else 5)
    lines = [
        f"{one['chunk']} tokens: {1e3 * one['alone_s']:.3f} ms alone, {1e3 * one['pending_s']:.3f} ms beside a pending "
        f"receive: {one['lost']:.1%} of its rate lost"
        for one in rates
    ]
    lost = [one for one in rates if one["lost"] > MOST_LOST] if scope.on_gpu else []
    faults = [f"{one['chunk']} tokens: {one['lost']:.0%} of the rate is lost" for one in lost]
    return finding_of(lines, faults, {"chunks": rates})


@step(
    title="Links",
    must_show="long messages at about 80 % of the datasheet, short ones in 20 to 40 us, all pairs alike",
    otherwise="far less: peer-to-peer access is off (`nvidia-smi topo -p2p r`), or IOMMU or ACS is on",
    timeout_s=400,
    applies=one_gpu,
)
def links(scope: Scope) -> Finding:
    """Messages and all-gathers between all ranks."""
    from calibrate.data import read_measurements

    output = Path(scope.folder, "links.csv")
    words = ["--ranks", scope.most_ranks, "--device", scope.device, "--minutes", 0.1 if scope.quick else 1]
    if scope.quick or not scope.on_gpu:
        words += ["--max-bytes", "1MiB"]
    answer = kvrsim("calibrate", "links", "-o", output, "--even-if-busy", *words)
    rows = (row for row in read_measurements(output) if row.operation == "send_recv" and row.messages == 1)
    messages = [(row.bytes, row.median_s) for row in rows if row.bytes]
    shortest, longest = min(messages)[0], max(messages)[0]
    rates = [nbytes / median_s for nbytes, median_s in messages if nbytes == longest]
    short_s = [median_s for nbytes, median_s in messages if nbytes == shortest]
    lines = [
        f"{longest} bytes: {min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f} GB/s one way; {shortest} bytes: "
        f"{1e6 * min(short_s):.0f} to {1e6 * max(short_s):.0f} us"
    ]
    uneven = scope.on_gpu and max(rates) > 2 * min(rates)
    return finding_of(lines, ["pairs differ more than twofold"] if uneven else [], answer)


@step(
    title="Calibration",
    must_show="a profile, whose operations are fitted within a few per cent",
    otherwise="busy or hot: the message says by what; a large error of one operation: see its rows in mine.compute.csv",
    timeout_s=1800,
)
def calibrate(scope: Scope) -> Finding:
    """A profile of this machine."""
    words = [
        "--model",
        scope.model,
        "--device",
        scope.device,
        "--minutes",
        0.3 if scope.quick else scope.calibration_minutes,
    ]
    if not scope.on_gpu:
        words += ["--ctx", "1k", "--ranks", scope.most_ranks, "--attention", "sdpa", "--even-if-busy"]
    try:
        answer = kvrsim("calibrate", "all", "-o", scope.profile, *words)
    except RuntimeError as error:
        if scope.on_gpu or not any(word in str(error) for word in _UNSTEADY):
            raise
        return Finding(status="skipped", lines=[f"this CPU is not steady enough to be calibrated: {error}"])
    profile = json.loads(scope.profile.read_text("utf-8"))
    state = profile["provenance"].get("measured: device_state", "not known")
    lines = [f"{kind}: mean error {fit['mape']:.1%}" for kind, fit in profile["operations"].items()]
    lines.append(f"lost beside a pending receive: {profile['links']['pending_share']:.1%}")
    lines.append(f"clock and power: {state}")
    return finding_of(lines, [], answer)


def confirm(scope: Scope, gpus: int) -> Finding:
    """Plan with that profile, measure the candidates."""
    if not scope.profile.exists():
        return Finding(status="skipped", lines=["`calibrate` has left no profile"])
    words = ["--gpus", gpus, "--profile", scope.profile, "--model", scope.model, "--device", scope.device]
    words += ["--ctx", "16k" if scope.on_gpu and gpus > 1 else scope.ctx, "--top", 1]
    words += ["--repeats", 2 if scope.quick else 5]
    answer = kvrsim("confirm", *words, accepted=(0, 1))
    middle = median_high(abs(one["rel_error"]) for one in answer["candidates"])
    lines = [
        f"{one['strategy']} {one['partition']}: predicted {1e3 * one['predicted_ttft_s']:.1f} ms, measured "
        f"{1e3 * one['measured_ttft_s']:.1f} ms ({one['rel_error']:+.1%})"
        for one in answer["candidates"]
    ]
    lines.append(f"median error {middle:.1%}, regret {answer['regret']:+.1%}")
    faults = [f"median error {middle:.1%}"] if scope.on_gpu and middle > MOST_ERROR else []
    if scope.on_gpu and not answer["ok"]:
        faults.append("confirm's own checks were not met (`ok` is false)")
    if not scope.on_gpu:
        lines.append("Not judged: a tiny model on a CPU that others may use.")
    return finding_of(lines, faults, {key: answer[key] for key in ("candidates", "regret", "max_logit_error", "ok")})


STEPS.extend(
    Step(
        name=f"confirm-{gpus}",
        title=f"Plan and measure on {gpus} GPU{'s' if gpus > 1 else ''}",
        must_show=f"`ok`: logits equal, no faster candidate; median error of predicted TTFTs at most {MOST_ERROR:.0%}",
        otherwise="a predicted TTFT too short on 1 GPU: it is slower than during calibration, see `clock`; errors "
        "that grow with the ranks: see `pending` and `links`; a time-out: see `transport`",
        run=partial(confirm, gpus=gpus),
        timeout_s=900,
        applies=partial(too_many_gpus, gpus=gpus),
    )
    for gpus in (1, 2, 4, 8)
)


@step(
    title="Long context",
    must_show="a first token; no memory error of host or device",
    otherwise="out of the device's memory: a smaller --ctx; of the host's: look at the attention kernel",
    timeout_s=1500,
)
def long_context(scope: Scope) -> Finding:
    """One prefill as long as a model allows, on one device."""
    words = ["--strategy", "single", "--gpus", 1, "--ctx", scope.long_ctx, "--model", scope.long_model]
    words += ["--attention", "flash", "--repeats", 1, "--device", scope.device, "--dtype", scope.dtype]
    answer = kvrsim("run", *words, "--profile", "roofline", "--timeout", "1200s")
    return finding_of([f"{scope.long_ctx} tokens: first token after {answer['measured_ttft_s']:.2f} s"], [], answer)


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
        kernels=("flash", "sdpa", "eager"),
        max_context=parse_tokens(ctx, "ctx"),
        threads=1,
    )


def _state(product: Mapping[str, Any]) -> str:
    """Clock and power at the end of a product, if NVML reports them."""
    state = product["at_the_end"]
    if not state or state["sm_clock_hz"] is None:
        return ""
    power = "" if state["power_w"] is None else f", {state['power_w']:.0f} W"
    reasons = f", limited by {', '.join(state['throttled'])}" if state["throttled"] else ""
    return f" at {state['sm_clock_hz'] / 1e6:.0f} MHz{power}{reasons}"


def _smi(*words: str) -> str:
    """The output of nvidia-smi; empty if it is missing or fails."""
    try:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
