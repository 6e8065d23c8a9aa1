"""Random profiles, some with known errors, some with measured shapes."""

from __future__ import annotations

from collections.abc import Sequence

from kvrsim.choices import DTYPES
from kvrsim.engine import HostRates
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.gemm import Product
from kvrsim.kernels.profile import OPERATION_KINDS, CalibrationProfile, LinkRates, OperationFit, SendStyle, ValidRange
from tests.building.drawing import Draws, log, maybe
from tests.building.machines import any_link
from tests.building.rates import any_kernels


def any_profile(
    rng: Draws,
    gpu: GpuSpec,
    *,
    sends: SendStyle | None = None,
    host: bool | None = None,
    shapes: Sequence[Product] = (),
) -> CalibrationProfile:
    """A profile with random rates; 20 % of operations have known errors. shapes: products with measured times."""
    host = rng.random() < 0.5 if host is None else host
    style: SendStyle = sends or rng.choice(["overlap", "sender", "rendezvous"])
    link = any_link(rng)
    return CalibrationProfile(
        name="random",
        gpu=gpu.name,
        description="drawn at random",
        not_covered="",
        kernels=any_kernels(rng, gpu, shapes=shapes),
        host=HostRates(
            layer_s=log(rng, -6, -2) if host else 0.0,
            gather_piece_s=log(rng, -6, -4) if host else 0.0,
            resume_s=maybe(rng, 0.0, lambda: log(rng, -6, -3)) if host else 0.0,
        ),
        links=LinkRates(
            link="random",
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            latency_s=link.latency_s,
            short_bytes_per_s=link.short_bytes_per_s,
            gather=link.gather,
            sends=style,
            sends_over_bus=style,
            message_sms=maybe(rng, 0, lambda: rng.randint(1, 64)),
            message_copies=maybe(rng, 0.0, lambda: 8.0 * rng.random()),
        ),
        valid=ValidRange(
            context_len=(1, 10**6), num_gpus=(1, 64), hidden_size=(1, 10**5), head_dim=(1, 10**4), dtypes=DTYPES
        ),
        operations={kind: any_operation(rng) for kind in OPERATION_KINDS if rng.random() < 0.2},
        residual=None,
        provenance={},
    )


def any_operation(rng: Draws) -> OperationFit:
    """A fit with errors of up to 20 %."""
    return OperationFit(
        source="drawn at random",
        num_rows=rng.randint(0, 100),
        mape=rng.random() / 5,
        cross_validated_mape=rng.random() / 5,
        log_sd=rng.random() / 5,
        interpolated_log_sd=maybe(rng, None, lambda: rng.random() / 5),
        systematic_log_sd=maybe(rng, None, lambda: rng.random() / 5),
        seen={"chunk": (1.0, log(rng, 0, 5))},
    )
