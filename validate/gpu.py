"""Check kvrsim on a GPU node: `python -m validate.gpu [--quick] [--steps a,b] [--output FOLDER]`.

Every step runs commands of kvrsim in separate processes, with a time limit; a failure does not stop the other steps.
report.md is rewritten after each step. docs/how-to/gpu.md says what each step must show, and what to do if it does not.
Without a GPU the steps run on the CPU with a tiny model. The exit code is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high

from kvrsim.strategies import usual_names
from validate.report import CommandError, kvrsim, table, write_page

TINY = Path(__file__).parent / "models" / "tiny.json"  # a model small enough for two busy cores
LOGITS = {"fp16": 2e-2, "fp32": 1e-3}  # largest accepted differences by dtype, as a share of the largest logit
OUTPUT_TOKENS = 8  # tokens that the step `logits` generates from the KV cache
MOST_ERROR = 0.10  # largest accepted median error of predicted TTFTs
_NO_GPU = (
    "**No GPU was available.** The steps ran on a CPU with a tiny model, to show that they run. Nothing here says how"
    " fast or how right kvrsim is on a GPU."
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, and the sizes of the steps' work."""

    folder: Path  # folder of the report and of the steps' files
    num_gpus: int  # number of GPUs; 0: the steps run on the CPU
    quick: bool = False  # whether to check only that the steps run

    @property
    def on_gpu(self) -> bool:
        """Whether the steps run on a GPU."""
        return self.num_gpus > 0

    @property
    def most_ranks(self) -> int:
        """Maximum number of ranks of a step: one per GPU, but at most 8; two on a CPU."""
        if self.on_gpu:
            return min(self.num_gpus, 8)
        return 2

    @property
    def dtype(self) -> str:
        """Dtype of all measurements."""
        return "fp16" if self.on_gpu else "fp32"

    @property
    def device(self) -> list[object]:
        """The option of the device."""
        return ["--device", "cuda" if self.on_gpu else "cpu"]

    @property
    def words(self) -> list[object]:
        """Options of every command: the device, and the model."""
        if self.on_gpu:
            return [*self.device, "--model", "llama-7b"]
        return [*self.device, "--model", TINY]

    @property
    def profile(self) -> Path:
        """The file that the step `calibrate` writes."""
        return self.folder / "mine.json"


@dataclass(kw_only=True, slots=True)
class Finding:
    """The result of a step."""

    lines: list[str] = field(default_factory=list)  # lines of the report
    faults: list[str] = field(default_factory=list)  # faults that the step found
    skipped: bool = False

    @property
    def status(self) -> str:
        """Status of the step: failed, skipped or passed."""
        if self.faults:
            return "failed"
        if self.skipped:
            return "skipped"
        return "passed"


def environment(machine: Machine) -> Finding:
    """Report driver, clocks, power, topology and other processes."""
    if not machine.on_gpu:
        return Finding(lines=["No GPU is available: the steps below run on the CPU."])
    settings = _smi(
        "--query-gpu=index,name,persistence_mode,pstate,clocks.sm,power.draw,power.limit,power.default_limit"
    )
    processes = _smi("--query-compute-apps=gpu_uuid,pid,used_memory")
    faults = []
    if processes:
        faults.append("other processes use the GPUs")
    for row in settings:
        index, _, persistence, *_, limit, default = [cell.strip() for cell in row.split(",")]
        if persistence == "Disabled":
            faults.append(f"GPU {index}: persistence mode is off")
        if limit != default:
            faults.append(f"GPU {index}: its power limit is {limit}, by default {default}")
    return Finding(lines=[*settings, *processes, *_smi("topo", "-m")], faults=faults)


def _smi(*words: str) -> list[str]:
    """Return the lines of nvidia-smi; none if the program is missing or fails."""
    command = ["nvidia-smi", *words]
    if words[0].startswith("--"):
        command.append("--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def links(machine: Machine) -> Finding:
    """Measure messages and all-gathers between all ranks."""
    from calibrate.data import read_measurements

    if machine.most_ranks < 2:
        return Finding(lines=["one GPU is here: messages need two"], skipped=True)
    output = machine.folder / "links.csv"
    minutes = 0.1 if machine.quick else 1
    words: list[object] = ["--ranks", machine.most_ranks, *machine.device, "--minutes", minutes]
    if machine.quick or not machine.on_gpu:
        words += ["--max-bytes", "1MiB"]
    kvrsim("calibrate", "links", "-o", output, *words, timeout_s=400)
    rows = [row for row in read_measurements(output) if row.operation == "send_recv" and row.messages == 1]
    by_bytes: dict[int, list[float]] = {}
    for row in rows:
        by_bytes.setdefault(row.bytes or 0, []).append(row.median_s)
    short_s = by_bytes[min(by_bytes)]
    longest = max(by_bytes)
    rates = [longest / seconds for seconds in by_bytes[longest]]
    line = (
        f"{longest} bytes: {min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f} GB/s one way; {min(by_bytes)} bytes: "
        f"{1e6 * min(short_s):.0f} to {1e6 * max(short_s):.0f} us, over {rows[0].kernel}"
    )
    finding = Finding(lines=[line])
    if machine.on_gpu and max(rates) > 2 * min(rates):
        finding.faults.append("pairs differ more than twofold")
    return finding


def logits(machine: Machine) -> Finding:
    """Compare logits and tokens of the paper's strategies, on two and on all ranks, with those of one process."""
    finding = Finding()
    for strategy in usual_names("paper"):
        if strategy == "single":
            _compare_logits(machine, strategy, 1, finding)
            continue
        for gpus in sorted({2, machine.most_ranks} - {1}):
            _compare_logits(machine, strategy, gpus, finding)
    return finding


def _compare_logits(machine: Machine, strategy: str, gpus: int, finding: Finding) -> None:
    """Add the difference of a strategy's logits, and whether its decoded tokens are equal, to a finding."""
    tokens = 4096 if machine.on_gpu else 256
    attention = "sdpa" if strategy == "tsp" else "flash"
    words: list[object] = ["--strategy", strategy, "--gpus", gpus, "--ctx", tokens, "--dtype", machine.dtype, "--check"]
    words += ["--attention", attention, "--repeats", 1, "--output-tokens", OUTPUT_TOKENS]
    if strategy == "kvr-s":  # uneven chunks
        chunks = [tokens // (gpus + 1)] * (gpus - 1)
        words += ["--partition", ",".join(map(str, [tokens - sum(chunks), *chunks]))]
    try:
        answer = kvrsim("run", *words, *machine.words, timeout_s=300, accepted=(0, 1))
    except CommandError as error:
        finding.faults.append(f"{strategy} on {gpus}: {error}")
        return
    share = answer["max_logit_error"] / answer["largest_logit"]
    ttft_ms = 1e3 * answer["measured_ttft_s"]
    text = f"{strategy} on {gpus}: logits differ by {share:.1e} of the largest, TTFT {ttft_ms:.1f} ms"
    tpot_ms = 1e3 * answer["tpot_s"]
    tokens_text = "equal" if answer["tokens_equal"] else f"not equal ({'; '.join(answer['reasons'])})"
    text = f"{text}; {OUTPUT_TOKENS} tokens decoded at {tpot_ms:.1f} ms each are {tokens_text}"
    if share <= LOGITS[machine.dtype] and answer["tokens_equal"]:
        finding.lines.append(text)
    else:
        finding.faults.append(text)


def calibrate(machine: Machine) -> Finding:
    """Measure a profile of this machine."""
    minutes = 10.0 if machine.on_gpu else 0.5
    if machine.quick:
        minutes = 0.3
    words: list[object] = ["--minutes", minutes]
    if not machine.on_gpu:
        words += ["--ctx", "1k", "--ranks", 2, "--attention", "sdpa"]
    try:
        kvrsim("calibrate", "all", "-o", machine.profile, *words, *machine.words, timeout_s=1800)
    except CommandError as error:
        if machine.on_gpu:
            raise
        return Finding(lines=[f"this CPU is not steady enough to be calibrated: {error}"], skipped=True)
    profile = json.loads(machine.profile.read_text("utf-8"))
    lines = [f"{kind}: mean error {fit['mape']:.1%}" for kind, fit in profile["operations"].items()]
    lines.append(f"lost beside a pending receive: {profile['links']['pending_share']:.1%}")
    return Finding(lines=lines)


def confirm(machine: Machine) -> Finding:
    """Plan with the profile for 1, 2, 4 and 8 of the machine's GPUs, and measure the candidates."""
    if not machine.profile.exists():
        return Finding(lines=["`calibrate` has left no profile"], skipped=True)
    finding = Finding()
    repeats = 2 if machine.quick else 5
    for gpus in (1, 2, 4, 8):
        if gpus > machine.most_ranks:
            break
        ctx = "256"
        if machine.on_gpu:
            ctx = "4k" if gpus == 1 else "16k"
        words = ["--gpus", gpus, "--profile", machine.profile, "--ctx", ctx, "--top", 1, "--repeats", repeats]
        answer = kvrsim("confirm", *words, *machine.words, timeout_s=900, accepted=(0, 1))
        candidates = answer["candidates"]
        middle = median_high(abs(candidate["rel_error"]) for candidate in candidates)
        texts = [f"{candidate['strategy']} {candidate['rel_error']:+.1%}" for candidate in candidates]
        finding.lines.append(f"{gpus} GPUs: {', '.join(texts)}; median {middle:.1%}, regret {answer['regret']:+.1%}")
        if machine.on_gpu and middle > MOST_ERROR:
            finding.faults.append(f"{gpus} GPUs: median error {middle:.1%}")
        if machine.on_gpu and not answer["ok"]:
            finding.faults.append(f"{gpus} GPUs: {'; '.join(answer['reasons'])}")
    if not machine.on_gpu:
        finding.lines.append("Not judged: a tiny model on a CPU that others may use.")
    return finding


def paper_links(machine: Machine) -> Finding:
    """Run tsp and kvr-e on the links as they are, through host memory, and beside the paper's noisy sidecar."""
    if machine.most_ranks < 2:
        return Finding(lines=["one GPU is here: messages need two"], skipped=True)
    finding = Finding()
    settings: dict[str, list[object]] = {
        "as it is": [],
        "noisy": ["--side-traffic", "64MiB" if machine.on_gpu else "64KiB"],
    }
    if machine.on_gpu:
        settings["through host memory"] = ["--host-memory"]
    for strategy in ("tsp", "kvr-e"):
        words: list[object] = ["--strategy", strategy, "--gpus", machine.most_ranks, "--dtype", machine.dtype]
        words += ["--ctx", "8k" if machine.on_gpu else "256", "--attention", "sdpa", *machine.words]
        for name, more in settings.items():
            answer = kvrsim("run", *words, *more, timeout_s=600)
            finding.lines.append(f"{strategy}, {name}: TTFT {1e3 * answer['ttft_s']:.1f} ms")
    return finding


def long_context(machine: Machine) -> Finding:
    """Run one prefill of the longest context on one device."""
    model: object = TINY
    ctx = "1k" if machine.quick else "4k"
    if machine.on_gpu:
        model = "llama-3-8b"
        ctx = "128k"
    words: list[object] = ["--strategy", "single", "--gpus", 1, "--ctx", ctx, "--attention", "flash", "--repeats", 1]
    words += [*machine.device, "--model", model, "--dtype", machine.dtype]
    answer = kvrsim("run", *words, "--timeout", "1200s", timeout_s=1500)
    return Finding(lines=[f"{ctx} tokens: first token after {answer['measured_ttft_s']:.2f} s"])


STEPS: dict[str, Callable[[Machine], Finding]] = {
    step.__name__.replace("_", "-"): step
    for step in (environment, links, logits, calibrate, confirm, paper_links, long_context)
}


def lines_of(machine: Machine, done: Sequence[tuple[str, Finding, float]]) -> list[str]:
    """The report on the finished steps, with the seconds of each."""
    lines = ["# Report", ""]
    if not machine.on_gpu:
        lines += [_NO_GPU, ""]
    rows = [(name, finding.status, f"{seconds:.0f} s") for name, finding, seconds in done]
    lines += table(("step", "result", "time"), rows)
    for name, finding, _ in done:
        text = "\n".join((*finding.faults, *finding.lines))
        lines += [f"## {name}", "", f"**{finding.status}**", "", "```text", text, "```", ""]
    return [*lines, "What each step must show, and what to do where it fails: docs/how-to/gpu.md."]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; write the report after each step, and progress to standard error."""
    from kvrsim.runtime.host import num_gpus

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="as short as it can be: whether the steps run")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {','.join(STEPS)}")
    parser.add_argument("--output", default="gpu-report", metavar="FOLDER", help="default: gpu-report")
    options = parser.parse_args(arguments)
    steps = options.steps.split(",")
    if unknown := [name for name in steps if name not in STEPS]:
        parser.error(f"--steps: got {','.join(unknown)!r}, accepted: some of {', '.join(STEPS)}")
    machine = Machine(folder=Path(options.output), num_gpus=num_gpus(), quick=options.quick)
    machine.folder.mkdir(parents=True, exist_ok=True)
    report = machine.folder / "report.md"
    done = list[tuple[str, Finding, float]]()
    for name, step in STEPS.items():
        if name not in steps:
            continue
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        start_s = time.monotonic()
        try:
            finding = step(machine)
        except Exception as error:  # any error of a step is a result in the report
            finding = Finding(faults=[f"{type(error).__name__}: {' '.join(str(error).split())}"])
        done.append((name, finding, time.monotonic() - start_s))
        print("\n  ".join([f"{finding.status} ({done[-1][2]:.0f} s)", *finding.faults]), file=sys.stderr)
        write_page(report, lines_of(machine, done))
    failed = [name for name, finding, _ in done if finding.faults]
    print(f"{report}: {len(done)} steps, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
