"""The first ten commands of three kinds of new users.

The first command gives the answer that the user wants. Every command gives an answer or one line that says what to type
instead.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrsim.cli import main as cli

pytestmark = pytest.mark.slow

TRACE = "timestamp,prompt_tokens,completion_tokens\n" + "".join(
    f"2026-11-01T09:00:{second // 4:02d}.{second % 4 * 25:02d},{500 + 37 * second % 4000},100\n"
    for second in range(160)
)
DEAD = """
from kvrsim.strategies import Strategy
from kvrsim.strategies.kv_runahead import layer as whole
from kvrsim.program import Send

def layer(step, rank):
    return (op for op in whole(step, rank) if not isinstance(op, Send))

STRATEGY = Strategy(name="mine", title="no send", source="a test", partition_rule="even", layer=layer, gathers_kv=False)
"""
FLEET = ("llama-3.1-8b", "8xh100", "--requests", "trace.csv", "--slo-ttft", "2s")
# For each persona: command, exit code, and parts of the output.
ENGINEER = (
    (
        "plan meta-llama/Llama-3.1-8B-Instruct 4xh100 --ctx 16k",
        0,
        ("Run ", "Expect ", "90 % sure", "Because ", "Engines today"),
    ),
    ("plan -h", 0, ("--help-all", "Example")),
    ("plan llama-3.1-8b 4xh100 --ctx 16k --tp 4", 2, ("accepted: --strategies tp8",)),
    ("plan llama-3.1-8b 4xh100 --ctx 16k --strategies tp4,pp4", 0, ("tp", "pp")),
    ("plan llama-3.1-8b 4xh100 --ctx 16k --engine vlm", 2, ("did you mean vllm",)),
    ("plan llama-3.1-8b 4xh100 --ctx 16k --engine vllm --only-deployable vllm", 0, ("--emit vllm",)),
    ("plan llama-3.1-8b 4xh100 --ctx 16k --emit vllm", 0, ("vllm serve", "--tensor-parallel-size")),
    ("plan llama-3.1-8b 4xh100 --ctx 16k --slo 1ms --strategies tp,pp", 1, ("misses the target",)),
    ("plan llama-3.1-405b 1xh100 --ctx 16k --strategies tp,pp", 1, ("Nothing fits", "Would fit")),
    ("models", 0, ("llama-3.1-8b",)),
)
PLANNER = (
    ("capacity {fleet} --tpot 50ms --price-per-gpu-hour 2.5", 0, ("prefill + ", " decode = ", "$ a month", "engines:")),
    ("capacity --requests trace.csv --slo-ttft 2s", 2, ("--model is missing",)),
    ("capacity {fleet}", 0, ("for prefill only", "interval:")),
    ("capacity {fleet} --percentile 99.9 --only-deployable vllm", 0, ("99.9 %",)),
    ("capacity {fleet} --columns timestamp=timestamp,context=prompt_tokens", 0, ("answer:",)),
    ("capacity {fleet} --rate-scale 3", 0, ("answer:",)),
    ("capacity {fleet} --format md", 0, ("| --- |",)),
    ("capacity llama-3.1-8b 8xh100 --requests synthetic:possion,rate=1 --slo-ttft 2s", 2, ("did you mean poisson",)),
    ("capacity llama-3.1-8b 8xh100 --requests trace.csv --slo-ttft 10ms --max-gpus 8", 1, ("would meet",)),
    ("capacity {fleet} --emit vllm --tpot 50ms", 0, ("--tensor-parallel-size", "answer:")),
)
RESEARCHER = (
    (
        "plan --gpus 8 --ctx 16k --strategies single,tsp,kvr-e,kvr-s",
        0,
        ("the question of the KV-Runahead paper", "kvr-s"),
    ),
    ("strategies", 0, ("kvr-s", "zigzag")),
    ("simulate --gpus 2 --ctx 1k --strategy ./mine.py:STRATEGY", 2, ("rank 1", "layer 0", "recv_kv")),
    ("run tiny-llama --gpus 2 --ctx 1k --strategy ./mine.py:STRATEGY", 2, ("what the runtime runs", "simulated only")),
    ("run --gpus 2 --ctx 64k --strategy kvr-e --model llama-3.1-405b", 2, ("tiny-llama",)),
    ("confirm tiny-llama --gpus 2 --ctx 1k --profile a100-eager", 2, ("calibrate all", "--other-machine")),
    ("simulate --gpus 4 --ctx 8k --strategy kvr-s --breakdown", 0, ("attention", "measured")),
    ("simulate --gpus 4 --ctx 8k --strategy kvr-e --link-bandwidth 1GB/s --json", 0, ("ttft_s",)),
    ("map --ctx 1k,4k --gpus 2 --strategies tsp,kvr-s --format csv", 0, ("context_len",)),
    ("profiles show a100-eager", 0, ("cross_validated_mape", "KV-Runahead")),
)


@pytest.mark.parametrize("persona", [ENGINEER, PLANNER, RESEARCHER], ids=["engineer", "planner", "researcher"])
def test_the_first_ten_commands(
    persona: tuple[tuple[str, int, tuple[str, ...]], ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text(TRACE)
    Path("mine.py").write_text(DEAD)
    assert len(persona) == 10
    for text, code, says in persona:
        assert cli.main(text.format(fleet=" ".join(FLEET)).split()) == code, text
        out, err = capsys.readouterr()
        assert all(one in out + err for one in says), text
        if code == 2:
            assert out == ""
            assert len(err.splitlines()) == 1
