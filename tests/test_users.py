"""Sessions of three new users: an inference engineer, a capacity planner, a researcher.

The first command answers the user's question. No command is a dead end: where one is refused or a target is missed, the
message names what to change, and the next command of the session, with that change, succeeds.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from kvrsim.cli import main as cli

pytestmark = pytest.mark.slow


class Step(NamedTuple):
    """A command of a session."""

    command: str  # words after "kvrsim"
    says: tuple[str, ...]  # parts of what is printed
    code: int = 0


PLAN = "plan llama-3.1-8b 4xh100 --ctx 16k"
ENGINEER = (
    Step(
        "plan meta-llama/Llama-3.1-8B-Instruct 2x8xh100 --ctx 32k --dtype fp8 --engine vllm --rate 0.2",
        ("Run ", "Expect ", "of the critical path", "90 % sure", "0.2 a second", "Engines today", "--emit vllm"),
    ),
    Step("plan -h", ("--help-all", "Example")),
    Step("plan nvidia/Llama-3.1-8B-Instruct-FP8 8xh100 --ctx 32k --strategies tp,pp", ("Run ",)),
    Step("plan llama-3.1-8b 8xh100 --ctx 8k,16k,32k", ("map",), 2),
    Step("map llama-3.1-8b 8xh100 --ctx 8k,16k,32k --gpus 8 --strategies tp,pp", ("tp",)),
    Step("plan llama-3.1-8b 8xh100 --ctx 32k --cached-prefix 90% --strategies tp,pp", ("Run ",)),
    Step(f"{PLAN} --tp 4", ("accepted: --strategies tp8",), 2),
    Step(f"{PLAN} --strategies tp4,pp4", ("tp", "pp")),
    Step(f"{PLAN} --engine vlm", ("did you mean vllm",), 2),
    Step(f"{PLAN} --engine vllm --only-deployable vllm", ("--emit vllm",)),
    Step(f"{PLAN} --engine sglang --emit vllm", ("sglang", "vllm"), 2),
    Step(f"{PLAN} --engine vllm --emit vllm", ("vllm serve", "--tensor-parallel-size", "--max-model-len")),
    Step(f"{PLAN} --slo 1ms --strategies tp,pp", ("misses the target",), 1),
    Step(f"{PLAN} --slo 2s --strategies tp,pp", ("Run ",)),
    Step("plan llama-3.1-405b 1xh100 --ctx 16k --strategies tp,pp", ("Nothing fits", "Would fit"), 1),
    Step("plan llama-3.1-405b 8xh100 --ctx 16k --strategies tp,pp --dtype fp8", ("Run ",)),
    Step(
        "calibrate prefills logged.csv --profile h100-flash --model llama-3.1-8b --strategy tp --gpus 8 -o mine.json",
        ("mine.json",),
    ),
    Step("plan llama-3.1-8b 8xh100 --profile mine.json --strategies tp,pp", ("--ctx is missing",), 2),
    Step("plan llama-3.1-8b 8xh100 --profile mine.json --strategies tp,pp --ctx 8k", ("Run ",)),
    Step("models", ("llama-3.1-8b",)),
)
WHOLE = "capacity llama-3.1-8b 8xh100 --slo-ttft 2s"
FLEET = f"{WHOLE} --group-sizes 1,2"  # fewer fleets than a user compares
PLANNER = (
    Step(
        f"{WHOLE} --requests trace.csv --tpot 50ms --price-per-gpu-hour 2.5",
        ("split or not: ", "for prefill and decoding", "$ a month", "engines:"),
    ),
    Step("capacity --requests trace.csv --slo-ttft 2s", ("--model is missing",), 2),
    Step(f"{FLEET} --requests trace.csv", ("answer:", "for prefill only", "interval:")),
    Step(f"{FLEET} --requests odd.csv", ("--columns timestamp=COLUMN",), 2),
    Step(f"{FLEET} --requests odd.csv --columns timestamp=began,context=words", ("answer:",)),
    Step(f"{FLEET} --requests trace.csv --percentile 0.95", ("95",), 2),
    Step(f"{FLEET} --requests trace.csv --percentile 95 --format md", ("95", "| --- |")),
    Step(f"{FLEET} --requests synthetic:possion,rate=1", ("did you mean poisson",), 2),
    Step(f"{FLEET} --requests synthetic:poisson,rate=1,requests=200,context=2k", ("answer:",)),
    Step(f"{FLEET} --requests trace.csv --rate-scale 3 --tpot 50ms", ("answer:",)),
    Step(f"{FLEET} --requests trace.csv --percentile 99.9 --only-deployable vllm", ("99.9 %",)),
    Step(
        "capacity llama-3.1-8b 8xh100 --requests trace.csv --slo-ttft 9ms --max-gpus 8 --group-sizes 1,2",
        ("would meet",),
        1,
    ),
    Step(f"{FLEET} --requests trace.csv --engine vllm --emit vllm --tpot 50ms", ("vllm serve", "--tensor-parallel-")),
    Step(f"{FLEET} --requests trace.csv --plot fleet.html", ("answer:",)),
)
RESEARCHER = (
    Step(
        "plan --gpus 8 --ctx 16k --strategies single,tsp,kvr-e,kvr-s",
        ("the question of the KV-Runahead paper", "kvr-s"),
    ),
    Step("strategies", ("kvr-s", "zigzag")),
    Step("plan --gpus 4 --ctx 8k --strategies tsp,kvr-s,kvr-p", ("table build",), 2),
    Step("table build --gpus 4 --ctx 4k,8k -o table.json", ("table.json",)),
    Step("plan --gpus 4 --ctx 8k --strategies tsp,kvr-s,kvr-p --table table.json", ("kvr-p",)),
    Step("simulate --gpus 2 --ctx 1k --strategy ./dead.py:STRATEGY", ("rank 1", "layer 0", "recv_kv"), 2),
    Step("simulate --gpus 2 --ctx 1k --strategy ./live.py:STRATEGY", ("TTFT",)),
    Step(
        "run tiny-llama --gpus 2 --ctx 1k --strategy ./live.py:STRATEGY", ("what the runtime runs", "simulated only"), 2
    ),
    Step("simulate --gpus 4 --ctx 8k --strategy kvr-s --noise slow-gpu:2x1.3", ("kvr-s",)),
    Step("simulate --gpus 4 --ctx 8k --strategy kvr-s --breakdown", ("attention", "measured")),
    Step("simulate --gpus 4 --ctx 8k --strategy kvr-s --link-bandwidth 10GB/s --json", ("ttft_s",)),
    Step("plan llama-3.1-8b --gpus 4 --ctx 16k --profile h100-flash --strategies tsp,kvr-s", ("h100",)),
    Step("map --ctx 1k,4k --gpus 2 --strategies tsp,kvr-s --format csv", ("context_len",)),
    Step("profiles show a100-eager", ("cross_validated_mape", "KV-Runahead")),
)
SESSIONS = {"engineer": ENGINEER, "planner": PLANNER, "researcher": RESEARCHER}
_STRATEGY = """
from kvrsim.strategies import Strategy
from kvrsim.strategies.kv_runahead import layer as whole
from kvrsim.program import Send

def layer(step, rank):
    return (op for op in whole(step, rank) if not ({drops} and isinstance(op, Send)))

STRATEGY = Strategy(name="mine", title="a chain", source="a test", partition_rule="even", layer=layer, gathers_kv=False)
"""


def _write_files() -> None:
    """Write a trace, the same with odd names of columns, logged TTFTs, and two strategies."""
    numbers = random.Random(1)
    arrival_s = 0.0
    rows = []
    for _ in range(100):
        arrival_s += numbers.expovariate(4)
        rows.append((f"{arrival_s:.3f}", str(numbers.randint(200, 3000)), str(numbers.randint(20, 300))))
    for name, head in (("trace.csv", "timestamp,prompt_tokens,completion_tokens"), ("odd.csv", "began,words,answer")):
        Path(name).write_text("\n".join([head, *map(",".join, rows), ""]))
    logged = [f"{tokens},{20 + tokens / 60 + numbers.random():.1f}" for tokens in (1024, 4096, 16384)]
    Path("logged.csv").write_text("\n".join(["prompt_tokens,ttft_ms", *logged, ""]))
    Path("dead.py").write_text(_STRATEGY.format(drops=True))
    Path("live.py").write_text(_STRATEGY.format(drops=False))


@pytest.mark.parametrize("user", SESSIONS)
def test_a_session_has_no_dead_end(
    user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_files()
    session = SESSIONS[user]
    assert session[0].code == 0, "the first command answers the question"
    for step, following in zip(session, (*session[1:], None), strict=True):
        if step.code:
            assert following is not None
            assert following.code == 0, "the next step works"
        assert cli.main(step.command.split()) == step.code, step.command
        output, errors = capsys.readouterr()
        assert all(part in output + errors for part in step.says), (step.command, output, errors)
        if step.code == 2:
            assert output == ""
            assert len(errors.splitlines()) == 1
