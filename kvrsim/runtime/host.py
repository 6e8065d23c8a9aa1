"""What this host has to compute with."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from kvrsim.choices import DEVICES
from kvrsim.errors import InputError


def num_gpus() -> int:
    """GPUs that torch sees here."""
    return int(torch.cuda.device_count())


def devices(device: str, threads: int) -> int:
    """How many ranks can compute at once: GPUs, or cores over threads."""
    if device == "cuda":
        return num_gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


def chosen_device(device: str) -> str:
    """The device, auto: cuda where there is one; InputError where it is none or not there."""
    if device not in DEVICES:
        raise InputError("device", device, ", ".join(DEVICES))
    there = num_gpus() > 0
    if device == "cuda" and not there:
        raise InputError("device", device, "cpu: torch sees no GPU here")
    return ("cuda" if there else "cpu") if device == "auto" else device


def cpu_name() -> str:
    """As the maker calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine() or "CPU"
