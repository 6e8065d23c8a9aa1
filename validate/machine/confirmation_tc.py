"""Two ranks in network namespaces of their own, joined by a link that the kernel throttles; for root on Linux."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrsim.profile.profile import load_profile
from kvrsim.runtime.host import devices

# A packet's payload over its bytes on the wire: 1500 of MTU less 52 of IP and TCP with timestamps, 14 of Ethernet.
PAYLOAD = 1448 / 1514
LATENCY_S = 1.5e-4  # of a short message over such a pair: 90 to 210 us
_NAMES = (f"kvrsim-{os.getpid()}-a", f"kvrsim-{os.getpid()}-b")
_ENDS = ("kvrsim0", "kvrsim1")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = "29517"
_LIMIT_S = 600.0


def why_not() -> str | None:
    """Why it cannot be done here; None: it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not installed"
    if devices("cpu", 1) < len(_NAMES):
        return "one core is too few for two ranks"
    try:
        with throttled(1e9):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {(error.stderr or '').strip()}"


@contextmanager
def throttled(bits_per_s: float) -> Iterator[None]:
    """While this lasts, both namespaces are there, and each sends to the other at that rate."""
    _clean()
    try:
        for name in _NAMES:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", _ENDS[0], "netns", _NAMES[0], "type", "veth", "peer", _ENDS[1], "netns", _NAMES[1])
        rate = f"{bits_per_s / 1e3:.0f}kbit"
        for name, end, address in zip(_NAMES, _ENDS, _ADDRESSES, strict=True):
            _do("ip", "-n", name, "link", "set", "lo", "up")
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            _do("ip", "-n", name, "link", "set", end, "up")
            shape = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "20ms")
            _do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, *shape)
        yield
    finally:
        _clean()


def confirm_throttled(
    profile: Path, config: Path, folder: Path, bits_per_s: float, ctx: str, options: Sequence[str]
) -> dict[str, Any]:
    """`kvrsim confirm` on two ranks over such a link, predicted with the link as it is set."""
    slow = folder / f"{profile.stem}-{bits_per_s / 1e6:.0f}mbit.json"
    _with_link(profile, slow, bits_per_s)
    command = ["confirm", "--gpus", "2", "--ctx", ctx, "--model", str(config), "--profile", str(slow), "--no-virtual"]
    return on_both(bits_per_s, [*command, *options])


def on_both(bits_per_s: float, arguments: Sequence[str]) -> dict[str, Any]:
    """What `kvrsim ... --json` prints, run by two ranks over such a link; RuntimeError where that is nothing."""
    command = [sys.executable, "-m", "kvrsim.cli.main", *arguments, "--json"]
    with throttled(bits_per_s):
        ranks = [_started(rank, command) for rank in range(len(_NAMES))]
        try:
            outputs = [rank.communicate(timeout=_LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
    if not outputs[0][0]:
        raise RuntimeError(f"ranks over {bits_per_s:g} bit/s: {' '.join(error for _, error in outputs)}")
    found: dict[str, Any] = json.loads(outputs[0][0])
    return found


def _started(rank: int, command: Sequence[str]) -> subprocess.Popen[str]:
    """One rank as torchrun would start it."""
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(_NAMES)), "MASTER_PORT": _PORT}
    told |= {"MASTER_ADDR": _ADDRESSES[0], "GLOO_SOCKET_IFNAME": _ENDS[rank], "OMP_NUM_THREADS": "1"}
    environment = os.environ | told
    return subprocess.Popen(
        ["ip", "netns", "exec", _NAMES[rank], *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _with_link(profile: Path, output: Path, bits_per_s: float) -> None:
    """The same profile with the throttled link instead of the loopback that it has measured."""
    known = load_profile(profile)
    bandwidth = bits_per_s / 8 * PAYLOAD
    links = replace(
        known.links, bandwidth_bytes_per_s=bandwidth, latency_s=LATENCY_S, short_bytes_per_s=None, gather=None
    )
    cluster = None if known.cluster is None else known.cluster.with_topology("switch")
    replace(known, name=output.stem, links=links, cluster=cluster).write(output)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


def _clean() -> None:
    """Namespaces take their ends of the link with them."""
    for name in _NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)
