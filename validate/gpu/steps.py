"""The steps of the first hour on a GPU node, in their order: what each must show, and what to do otherwise."""

from __future__ import annotations

from functools import partial

from validate.gpu import checks
from validate.gpu.step import Step


def steps() -> tuple[Step, ...]:
    """All of them."""
    confirms = (
        Step(
            name=f"confirm-{gpus}",
            title=f"Plan and measure on {gpus} GPU{'s' if gpus > 1 else ''}",
            must_show="`ok`: logits equal, no faster candidate; median error of predicted TTFTs at most "
            f"{checks.MOST_ERROR:.0%}",
            otherwise="a predicted TTFT too short on 1 GPU: it is slower than during calibration, see `clock`; errors "
            "that grow with the ranks: see `pending` and `links`; a time-out: see `transport`",
            run=partial(checks.confirm, gpus=gpus),
            timeout_s=900,
            applies=partial(checks.too_many_gpus, gpus=gpus),
        )
        for gpus in (1, 2, 4, 8)
    )
    return (*_BEFORE, *confirms, *_AFTER)


_BEFORE = (
    Step(
        name="environment",
        title="Environment",
        must_show="persistence mode on, the default power limit, no other process on the GPUs, NV# between all GPUs",
        otherwise="`nvidia-smi -pm 1`; `nvidia-smi -pl` with the default limit; end the other processes; PIX, PHB or "
        "SYS between GPUs: messages cross PCIe, calibrate the links and do not take a datasheet's",
        run=checks.environment,
        timeout_s=120,
    ),
    Step(
        name="transport",
        title="Transport alone",
        must_show=f"ranks start and use every link within {checks.START_S:.0f} s, over nccl; messages arrive intact",
        otherwise="a time-out: set NCCL_DEBUG=INFO and look at the last line of each rank; "
        "gloo instead of nccl: the ranks do not have a GPU each",
        run=checks.transport,
        timeout_s=300,
        applies=checks.one_gpu,
    ),
    Step(
        name="logits",
        title="Logits against one process",
        must_show="for each strategy that the runtime runs the logits of one process, to the dtype's precision",
        otherwise="only tsp differs: its mask; all differ: the attention kernel, see `kernels`, and try "
        "--attention eager",
        run=checks.logits,
        timeout_s=900,
    ),
    Step(
        name="kernels",
        title="Kernels by the profiler",
        must_show="a flash kernel for `flash` with and without a prefix (`flash_fwd` on A100; cuDNN for `sdpa` on "
        "H100), no aten::item inside layers",
        otherwise="efficient or math instead of flash: look at the dtype and the width of a head; aten::item: a "
        "mask is read on the host in each forward",
        run=checks.kernels,
        timeout_s=300,
    ),
    Step(
        name="clock",
        title="A product for 20 ms and for 2 s",
        must_show="a ratio of about 0.85 to 1, power at the limit and sw_power_cap in the long one; no heat",
        otherwise="below 0.75 or hw_slowdown: cooling or power supply; calibration heats the GPU first, so a ratio of "
        "0.87 is no fault",
        run=checks.clock,
        timeout_s=120,
    ),
    Step(
        name="pending",
        title="A layer alone and beside a pending receive",
        must_show=f"at most {checks.MOST_LOST:.0%} of the rate lost",
        otherwise="set NCCL_MAX_P2P_NCHANNELS=4 and compare; what is left is measured by `calibrate` and used in plans",
        run=checks.pending,
        timeout_s=400,
        applies=checks.one_gpu,
    ),
    Step(
        name="links",
        title="Links",
        must_show="long messages at about 80 % of the datasheet, short ones in 20 to 40 us, all pairs alike",
        otherwise="far less: peer-to-peer access is off (`nvidia-smi topo -p2p r`), or IOMMU or ACS is on",
        run=checks.links,
        timeout_s=400,
        applies=checks.one_gpu,
    ),
    Step(
        name="calibrate",
        title="Calibration",
        must_show="a profile, whose operations are fitted within a few per cent",
        otherwise="busy or hot: the message says by what; a large error of one operation: see its rows in "
        "mine.compute.csv",
        run=checks.calibrate,
        timeout_s=1800,
    ),
)
_AFTER = (
    Step(
        name="long-context",
        title="Long context",
        must_show="a first token; no memory error of host or device",
        otherwise="out of the device's memory: a smaller --ctx; of the host's: look at the attention kernel",
        run=checks.long_context,
        timeout_s=1500,
    ),
)
