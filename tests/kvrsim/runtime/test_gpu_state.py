"""Clock, power, throttling and other processes, as stand-ins of nvidia-smi report them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvrsim.runtime.gpu_state import GpuLog, summary

FIELDS = ("clocks.sm", "power.draw", "enforced.power.limit", "clocks_event_reasons.active")


def test_readings_are_summarised_and_broken_lines_do_not_count() -> None:
    lines = ["1980, 120.5, 700.00, 0x0000000000000001", *["1410, 695.0, 700.00, 0x0000000000000004"] * 3]
    state = summary([*lines, "14"], FIELDS)
    assert state["readings"] == 4
    assert state["unreadable"] == []
    assert state["sm_clock_hz"] == [1.41e9, 1.41e9, 1.98e9]
    assert state["power_w"] == [120.5, 695.0, 695.0]
    assert state["throttled"] == {"sw_power_cap": 0.75}, "an idle GPU is not throttled"
    assert summary(["600, 300.0, 700.00, 0x48"], FIELDS)["throttled"] == {
        "hw_slowdown": 1.0,
        "hw_thermal_slowdown": 1.0,
    }
    assert summary([], FIELDS) == {}
    assert summary(lines, ()) == {}


def test_a_counter_that_cannot_be_read_hides_no_other_one() -> None:
    state = summary(["1410, [N/A], 700.00, 0x4", "1400, [N/A], [Unknown Error], 0x0"], FIELDS)
    assert state["sm_clock_hz"] == [1.4e9, 1.405e9, 1.41e9]
    assert state["power_limit_w"] == 700
    assert state["throttled"] == {"sw_power_cap": 0.5}
    assert state["unreadable"] == ["power"]
    assert "power_w" not in state
    alone = summary(["1410, 1.0, 700.00, [N/A]"], FIELDS)
    assert alone["unreadable"] == ["throttling"]
    assert "throttled" not in alone
    assert summary(["1410, 1.0, 700.00"], FIELDS[:3])["unreadable"] == ["throttling"]


READINGS = "1410, [N/A], 400.00, 0x24"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an nvidia-smi that knows the older name of the throttle reasons, and two processes on the GPU.

    With CUDA_VISIBLE_DEVICES=1, CUDA's device 0 is device 1 of nvidia-smi, so nvidia-smi gets the UUID.
    """
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"""#!/bin/sh
echo "$*" >> {tmp_path}/words
case "$*" in
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;;
*compute-apps*) echo "GPU-bb, 71, /home/me/train.py, 1200 MiB"; echo "GPU-bb, {os.getpid()}, python, 500 MiB"
                echo "GPU-cc, 72, other.py, 1 MiB"; exit 0;;
*loop-ms*) echo "{READINGS}"; touch {tmp_path}/logged; exec sleep 60;;
esac
echo "{READINGS}"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="bb"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return tmp_path


def test_the_log_says_what_limits_the_clock_what_is_unknown_and_who_else_runs(smi: Path) -> None:
    log = GpuLog([0])
    with log:
        while not (smi / "logged").exists():
            pass
    assert "--id=GPU-bb" in (smi / "words").read_text()
    assert log.state["throttled"] == {"sw_power_cap": 1.0, "sw_thermal_slowdown": 1.0}
    assert log.others == ("train.py, process 71, 1200 MiB",), "neither this process nor those of other GPUs"
    processes, unknown, heat = log.notes()
    assert "train.py" in processes
    assert unknown == "nvidia-smi does not report of these GPUs: power"
    assert heat == "the GPU's clock was limited (sw_thermal_slowdown): times may be too long"
    assert log.conditions() == {
        "GPU clock": "1410 MHz (1410 to 1410)",
        "GPU clock limited by": "sw_power_cap 100% of the time, sw_thermal_slowdown 100% of the time",
    }


def test_a_log_that_knows_nothing_says_so(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (smi / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    with GpuLog([0]) as broken:
        pass
    assert broken.state == broken.conditions() == {}
    assert broken.notes() == ("clock and power of the GPUs are not known: nvidia-smi reports none",)
    monkeypatch.setenv("PATH", str(smi / "empty"))
    with GpuLog([0]) as missing:
        pass
    assert missing.notes() == ("clock and power of the GPUs are not known: nvidia-smi is not installed",)
    with GpuLog([]) as cpu:
        pass
    assert (cpu.state, cpu.notes()) == ({}, ())
