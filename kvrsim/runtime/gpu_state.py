"""State of GPUs while something is timed: clock, power, throttling and other processes, as nvidia-smi reports them.

This module does not import torch, but its functions do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Self

# nvidia-smi's names of the bits of nvmlClocksThrottleReasons in nvml.h. A large GPU runs whole prefills at its power
# cap; the other reasons mean a fault of the machine.
_POWER_CAP = "sw_power_cap"
_REASONS = {
    0x04: _POWER_CAP,
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
_EVERY_MS = 200  # milliseconds between readings
_CLOCK = "clocks.sm"
_POWER = "power.draw"
_LIMIT = "enforced.power.limit"
_REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # newer and older name
_MEANINGS = {_CLOCK: "clock", _POWER: "power", _LIMIT: "power limit"} | dict.fromkeys(_REASON_FIELDS, "throttling")
_TIMEOUT_S = 30.0
_MOST_NAMED = 3  # processes that a note names
_PROCESS_CELLS = 4  # cells of a line about a process


class GpuLog:
    """Log of clock, power and throttle reasons of GPUs, written by nvidia-smi while the context is open.

    GPUs are named by UUID, because nvidia-smi counts all GPUs of the machine, and CUDA only those in
    CUDA_VISIBLE_DEVICES. Make the log before own processes use the GPUs: it then looks for others.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        """gpus: CUDA's numbers; without GPUs nothing is logged."""
        self._uuids = [_uuid(gpu) for gpu in gpus]
        self._has_program = shutil.which("nvidia-smi") is not None
        self._fields: tuple[str, ...] = ()
        self.others: tuple[str, ...] = ()  # other processes on the GPUs
        if self._uuids and self._has_program:
            self._fields = _known_fields(self._uuids[0])
            self.others = _other_processes(self._uuids)
        self._lines = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._process: subprocess.Popen[bytes] | None = None
        self.state: Mapping[str, Any] = {}  # summary of the readings, after the context

    def __enter__(self) -> Self:
        if self._fields:
            query = f"--query-gpu={','.join(self._fields)}"
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={','.join(self._uuids)}"]
            self._process = subprocess.Popen(
                [*command, f"--loop-ms={_EVERY_MS}"], stdout=self._lines, stderr=subprocess.DEVNULL
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._lines.seek(0)
        self.state = summary(self._lines.read().splitlines(), self._fields)
        if self.others:
            self.state = {**self.state, "other_processes": len(self.others)}
        self._lines.close()

    def conditions(self) -> dict[str, str]:
        """Return clock and power in words, as conditions of a measurement."""
        state = self.state
        words = {}
        if "sm_clock_hz" in state:
            low, middle, high = (hertz / 1e6 for hertz in state["sm_clock_hz"])
            words["GPU clock"] = f"{middle:.0f} MHz ({low:.0f} to {high:.0f})"
        if "power_w" in state:
            low, middle, high = state["power_w"]
            words["GPU power"] = f"{middle:.0f} W ({low:.0f} to {high:.0f})"
            if "power_limit_w" in state:
                words["GPU power"] += f", limit {state['power_limit_w']:.0f} W"
        if state.get("throttled"):
            shares = (f"{name} {share:.0%} of the time" for name, share in state["throttled"].items())
            words["GPU clock limited by"] = ", ".join(shares)
        return words

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user, after the context: what limited the clock, what is not known, and who else ran."""
        if not self._uuids:
            return ()
        notes = []
        if self.others:
            named = "; ".join(self.others[:_MOST_NAMED])
            notes.append(f"processes of others use these GPUs ({named}): times may be too long")
        if not self._has_program:
            notes.append("clock and power of the GPUs are not known: nvidia-smi is not installed")
        elif not self.state.get("readings"):
            notes.append("clock and power of the GPUs are not known: nvidia-smi reports none")
        elif unknown := self.state["unreadable"]:
            notes.append(f"nvidia-smi does not report of these GPUs: {', '.join(unknown)}")
        if heat := [reason for reason in self.state.get("throttled", {}) if reason != _POWER_CAP]:
            notes.append(f"the GPU's clock was limited ({', '.join(heat)}): times may be too long")
        return tuple(notes)


def summary(lines: Sequence[str], fields: Sequence[str]) -> dict[str, Any]:
    """Summarise nvidia-smi's lines: smallest, median and largest clock (Hz) and power (W), shares of throttle reasons.

    Incomplete lines do not count. A counter that no line has a number for, such as "[N/A]", is named in `unreadable`.
    """
    rows = [cells for line in lines if len(cells := [cell.strip() for cell in line.split(",")]) == len(fields)]
    if not rows or not fields:
        return {}
    readings: dict[str, list[float]] = {field: [] for field in fields}
    for cells in rows:
        for field, cell in zip(fields, cells, strict=True):
            value = _number(cell)
            if value is not None:
                readings[field].append(value)
    state: dict[str, Any] = {
        "readings": len(rows),
        "unreadable": sorted({_MEANINGS[field] for field in fields if not readings[field]}),
    }
    if clocks_mhz := readings[_CLOCK]:
        state["sm_clock_hz"] = [1e6 * min(clocks_mhz), 1e6 * median(clocks_mhz), 1e6 * max(clocks_mhz)]
    if powers_w := readings[_POWER]:
        state["power_w"] = [min(powers_w), median(powers_w), max(powers_w)]
    if limits_w := readings[_LIMIT]:
        state["power_limit_w"] = min(limits_w)
    reasons = next((readings[field] for field in fields if field in _REASON_FIELDS), [])
    if reasons:
        shares = {name: sum(bool(int(bits) & bit) for bits in reasons) / len(reasons) for bit, name in _REASONS.items()}
        state["throttled"] = {name: round(share, 3) for name, share in shares.items() if share}
    else:
        state["unreadable"] = sorted({*state["unreadable"], "throttling"})
    return state


def _number(cell: str) -> float | None:
    """The number of a cell, which may be hexadecimal; None for "[N/A]" and other words."""
    try:
        if cell.startswith("0x"):
            return float(int(cell, 16))
        return float(cell)
    except ValueError:
        return None


def _uuid(gpu: int) -> str:
    import torch

    return f"GPU-{str(torch.cuda.get_device_properties(gpu).uuid).removeprefix('GPU-')}"


def _known_fields(uuid: str) -> tuple[str, ...]:
    """Return the fields that this nvidia-smi knows: it refuses a query with any other one."""
    common = (_CLOCK, _POWER, _LIMIT)
    for reasons in _REASON_FIELDS:
        fields = (*common, reasons)
        if _smi(f"--query-gpu={','.join(fields)}", f"--id={uuid}") is not None:
            return fields
    return common


def _other_processes(uuids: Sequence[str]) -> tuple[str, ...]:
    """Return the other processes that compute on these GPUs, as text."""
    import torch

    listed: dict[str, str] = {}  # text by the number of the process
    for line in _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory") or ():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == _PROCESS_CELLS and cells[0] in uuids:
            listed[cells[1]] = f"{os.path.basename(cells[2])}, process {cells[1]}, {cells[3]}"
    here = str(os.getpid())
    if here in listed:
        del listed[here]
    elif torch.cuda.is_initialized() and not any(os.path.exists(f"/proc/{number}") for number in listed):
        # In a container the numbers are those of the host, and this process has one of them.
        listed = dict(list(listed.items())[1:])
    return tuple(listed.values())


def _smi(*words: str) -> list[str] | None:
    """Return the lines of nvidia-smi; None if it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()
