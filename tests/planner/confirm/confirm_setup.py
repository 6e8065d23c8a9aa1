"""A folder with a tiny model and an invented profile for commands that run on this machine."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrsim.cli.main import main
from kvrsim.engine import HostRates
from kvrsim.hardware import Cluster, GpuSpec, LinkSpec
from kvrsim.kernels.profile import CalibrationProfile, OperationFit, load_profile
from kvrsim.runtime.host import device_name
from kvrsim.units import scale
from tests.kvrsim.runtime.runtime_models import CONFIGS

BUSY = ("--max-error", "1000", "--max-regret", "1000")  # these tests do not check times


def made_up_profile(dtypes: tuple[str, ...] = ("fp32",)) -> CalibrationProfile:
    """A profile of a slow device."""
    base = load_profile("a100-eager")
    gpu = GpuSpec(
        name="cpu-1-thread",
        memory_bytes=2**33,
        hbm_bytes_per_s=5e9,
        peak_flops=dict.fromkeys(dtypes, 5e10),
        num_sms=1,
        source="made up",
    )
    link = LinkSpec(name="loopback", bandwidth_bytes_per_s=1e9, latency_s=1e-4, source="made up")
    fit = OperationFit(
        source="made up", num_rows=3, mape=0.1, cross_validated_mape=0.1, log_sd=0.1, seen={}, gather="ring"
    )
    kernels = scale(base.kernels, 1000.0)
    return replace(
        base,
        name="made-up",
        gpu=device_name("cpu"),  # the name of this machine
        kernels=replace(kernels, attention={"eager": kernels.attention["eager"]}),
        host=HostRates(layer_s=0.0, gather_piece_s=0.0),
        links=replace(base.links, link=link.name, bandwidth_bytes_per_s=1e9, latency_s=1e-4, sends="overlap"),
        valid=replace(base.valid, dtypes=dtypes),
        operations={"all_gather": fit},
        residual=None,
        cluster=Cluster(name="made-up", gpu=gpu, num_gpus=2, link=link, topology="switch"),
    )


def folder_with(folder: Path, name: str = "llama-gqa", dtypes: tuple[str, ...] = ("fp32",)) -> Path:
    """Write model.json and profile.json into a folder."""
    (folder / "model.json").write_text(json.dumps(CONFIGS[name]))
    made_up_profile(dtypes).write(folder / "profile.json")
    return folder


def arguments(folder: Path, command: str, *more: str, ctx: str = "96", gpus: str = "2") -> list[str]:
    files = ["--model", str(folder / "model.json"), "--profile", str(folder / "profile.json")]
    return [command, "--gpus", gpus, "--ctx", ctx, *files, "--device", "cpu", *more]


def said(words: Sequence[str]) -> tuple[int, Any, str]:
    """Run a command; return its exit code, its JSON or text, and its messages."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    text = out.getvalue()
    return code, json.loads(text) if text and "--json" in words else text, err.getvalue()


def generated(checkpoint: Path, ctx: int, seed: int, tokens: int) -> list[int]:
    """Tokens that transformers generates greedily from a checkpoint after the prompt of a seed, without kvrsim."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = torch.randint(0, model.config.vocab_size, (1, ctx), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(prompt)
    output = model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return [int(token) for token in output[0, ctx:]]
