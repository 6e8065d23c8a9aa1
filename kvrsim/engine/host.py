"""HostRates: the seconds that software adds to a prefill beside its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from kvrsim.io.schema import NonNegative


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRates:
    """The launching thread and the requests' way to it: a property of the software, not of the device."""

    layer_s: NonNegative  # seconds to issue one decoder layer
    gather_piece_s: NonNegative  # more, per rank that takes part, for the all-gathers of one layer
    resume_s: NonNegative = (
        0.0  # that the device idles after communication that held it, until what follows has been issued
    )
    request_s: NonNegative = 0.0  # before the first layer, once a request; the device waits
    token_s: NonNegative = 0.0  # more for each token of the request, as of a tokeniser; the device waits
    step_s: NonNegative = 0.0  # before each pass through the layers: of a chunked prefill, each piece on each stage
    prepare_s: NonNegative | None = None  # of the host, in each pass; None: not measured, as long as step_s
    message_s: NonNegative = 0.0  # to issue one send or one receive
    kernel_s: NonNegative = 0.0  # more than layer_s, for each kernel that the decoder layer launches
    collective_s: NonNegative = 0.0  # that each collective of tensor parallelism takes more than its kernel


NO_HOST = HostRates(layer_s=0.0, gather_piece_s=0.0, resume_s=0.0)
