"""Random command lines with right and wrong values; the commands measure nothing."""

from __future__ import annotations

import random

from fuzz_law import check_command

WRONG = (
    *("", " ", "-1", "0", "nan", "inf", "1e9", "1e400", "9" * 400, "x", "all", "8x", "0x10", "1.5", "-", "--", "-o"),
    *("\0", "\x1b[2J", "é", "١٢", "\n", "a\nb", ",", "1,,2", "1:2", "5:1:1", "1:1m:1"),
    *("/", ".", "/dev/null", "none.json"),
    *("$x^2$", "[red]", "{}", "%s", "../../x", "synthetic:", "synthetic:poisson", "tp2+", "tp0+ring", "all,tsp"),
)
_MACHINE: dict[str, tuple[str, ...]] = {
    "--model": ("llama-7b", "llama-3-8b", "qwen3-8b", "mixtral-8x7b", "falcon-7b"),
    "--profile": ("roofline", "a100-flash", "h100-flash", "a100-eager"),
    "--cluster": ("h100-nvlink", "a100-10gbs-bus", "l40s-pcie", "h100-2x8-ndr400"),
    "--link-bandwidth": ("10GB/s", "400Gb/s", "1B/s"),
    "--link-latency": ("5us", "0s", "1s"),
    "--topology": ("switch", "bus", "chain"),
    "--attention": ("flash", "eager", "sdpa"),
    "--dtype": ("fp16", "bf16", "fp8", "fp32"),
    "--memory-fraction": ("0.5", "1"),
}
_PREFILL = _MACHINE | {"--batch": ("1", "2", "64"), "--cached-prefix": ("0", "16", "256")}
_LENGTH = {"--ctx": ("512", "1k", "3000", "8", "1", "1m"), "--gpus": ("1", "2", "3", "4")}
_NOISE = {
    "--noise": ("paper", "jitter:0.1", "slow-gpu:0x2", "slow-link:0-1x4", "side-traffic:dwell=1ms,slowdown=3"),
    "--samples": ("2", "10"),
    "--seed": ("0", "7"),
}
_STRATEGY = (
    *("single", "tsp", "kvr-e", "kvr-s", "kvr-direct", "ring", "striped"),
    *("zigzag-ring", "zigzag", "ulysses", "tp", "pp", "pp-s"),
)
_MANY = {"--ctx": ("512,1k", "256:1k:256", "1k:4k:x2"), "--gpus": ("2", "1,2", "2,4")}
_FLAG = ("--json",)

# Words of a command, options that are always given, options that are sometimes given, and flags.
Options = dict[str, tuple[str, ...]]
COMMANDS: tuple[tuple[tuple[str, ...], Options, Options, tuple[str, ...]], ...] = (
    (
        ("plan",),
        _LENGTH,
        _PREFILL
        | _NOISE
        | {"--strategies": ("tsp", "single,kvr-e", "tsp,ring,tp2+ring"), "--method": ("grid", "analytical", "auto")}
        | {"--stride": ("64", "1"), "--trace": ("t.json",), "--plot": ("p.svg",)},
        _FLAG,
    ),
    (
        ("simulate",),
        _LENGTH | {"--strategy": (*_STRATEGY, "tp2+kvr-s", "tp2+pp")},
        _PREFILL
        | _NOISE
        | {"--partition": ("512,512", "256,256", "1000,2000", "1"), "--executor": ("batch", "event")}
        | {"--trace": ("t.json",)},
        (*_FLAG, "--breakdown"),
    ),
    (
        ("map",),
        _MANY,
        _PREFILL | {"--strategies": ("tsp,ring", "kvr-s"), "--link-bandwidths": ("10GB/s", "1GB/s,100GB/s")},
        _FLAG,
    ),
    (
        ("capacity",),
        {
            "--model": ("llama-7b",),
            "--cluster": ("a100-nvlink", "2xa100"),
            "--requests": ("synthetic:poisson,rate=1,requests=30,context=256", "synthetic:bursty,rate=2,requests=20"),
            "--slo-ttft": ("2s", "10ms"),
            "--max-gpus": ("2", "4"),
            "--replications": ("1", "2"),
        },
        _MACHINE
        | {"--percentile": ("50", "99", "100"), "--group-sizes": ("1", "1,2")}
        | {"--rate-scale": ("2", "0.5"), "--max-num-batched-tokens": ("4k",)}
        | {"--tpot": ("30ms",)}
        | {"--price-per-gpu-hour": ("2", "1=2,2=3"), "--objective": ("cost", "gpus"), "--seed": ("3",)},
        (*_FLAG, "--sure", "--uniform-only"),
    ),
    (("table", "build"), _MANY | {"--output": ("table.json",), "--jobs": ("1",)}, _PREFILL, _FLAG),
    (("models", "show", "llama-7b"), {}, {}, _FLAG),
    (("models", "list"), {}, {}, _FLAG),
    (("clusters", "show", "h100-nvlink"), {}, {}, _FLAG),
    (("profiles", "list"), {}, {}, _FLAG),
    (("profiles", "show", "a100-flash"), {}, {}, _FLAG),
)
_OTHERS = ("--version", "--help", "--no-such", "--json=1", "plan", "x", "--output", "-o")


def random_command(rng: random.Random) -> int:
    """Run one random command in the current folder; return its exit code."""
    words, always, sometimes, flags = rng.choice(COMMANDS)
    values = always | {
        key: sometimes[key] for key in rng.sample(sorted(sometimes), min(len(sometimes), rng.randint(0, 3)))
    }
    chosen = {key: rng.choice(pool) for key, pool in values.items()}
    if chosen.get("--ctx") == "1m":  # a search would take too long
        chosen["--gpus"] = "1"
    if rng.random() < 0.6 and chosen:
        chosen[rng.choice(sorted(chosen))] = rng.choice(WRONG)
    if chosen.get("--jobs", "1") != "1":  # other tests cover several processes
        chosen["--jobs"] = rng.choice(("0", "-1", "x", ""))
    line = [*words]
    for key in rng.sample(sorted(chosen), len(chosen)):
        line += [key, chosen[key]] if rng.random() < 0.9 else [f"{key}={chosen[key]}"]
    line += [flag for flag in flags if rng.random() < 0.4]
    if rng.random() < 0.1:
        line.insert(rng.randint(0, len(line)), rng.choice(_OTHERS))
    if rng.random() < 0.05:
        del line[rng.randrange(len(line))]
    return check_command(line)
