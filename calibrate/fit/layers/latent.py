"""fit_latent: flash kernels of latent attention from calls of DeepSeek-V3's widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from calibrate.fit.attention import fit_flash
from calibrate.fit.flash_presets import PRESETS
from calibrate.fit.solver import Fitted
from calibrate.importers.latent import LatentForm, mean_head_dim, read_latent
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.attention import FlashRates, LatentRates
from kvrsim.kernels.profile import CalibrationProfile

FORMS: tuple[LatentForm, ...] = ("expanded", "absorbed")
# Kernels that skip what is masked: calls without a prefix do not tell the cost of masked blocks.
_CAUSAL = tuple(name for name, preset in PRESETS.items() if preset.causal)


def fit_latent_section(part: JsonObject, profile: CalibrationProfile) -> Fitted[LatentRates]:
    """From a recipe that names the source of either form; InputError for what cannot be read."""
    part.only(FORMS)
    return fit_latent({form: part.text(form) for form in FORMS if part.has(form)}, load_gpu(profile.gpu))


def fit_latent(sources: Mapping[LatentForm, str], gpu: GpuSpec) -> Fitted[LatentRates]:
    """Each form as a flash kernel of its own; stated errors are those of the expanded form, as of a prefill.

    Single queries are not fitted: they are decoded by kernels of their own.
    """
    found: dict[LatentForm, Fitted[FlashRates]] = {}
    for form, source in sources.items():
        rows = [row for row in read_latent(source, form, "recipes") if (row.chunk or 0) > 1]
        fits = [fit_flash(rows, gpu, kernel=kernel, head_dim=mean_head_dim(form)) for kernel in _CAUSAL]
        best = min(fits, key=lambda fitted: fitted.cross_validated.errors().mape)
        found[form] = _named(best, form)
    expanded, absorbed = found["expanded"], found.get("absorbed")
    more = () if absorbed is None else (absorbed.own, absorbed.cross_validated, *absorbed.checks)
    return Fitted(
        rates=LatentRates(expanded=expanded.rates, absorbed=None if absorbed is None else absorbed.rates),
        source="; ".join(f"{one.source} ({form})" for form, one in found.items()),
        own=expanded.own,
        cross_validated=expanded.cross_validated,
        checks=(*expanded.checks, *more),
        seen={name: span for name, span in expanded.seen.items() if name in ("chunk", "num_attention_heads")},
    )


def _named(fitted: Fitted[FlashRates], form: LatentForm) -> Fitted[FlashRates]:
    """Its lines say which form they are about."""
    own, held_out = (replace(one, label=f"{form}, {one.label}") for one in (fitted.own, fitted.cross_validated))
    checks = tuple(replace(one, label=f"{form}, {one.label}") for one in fitted.checks)
    return replace(fitted, own=own, cross_validated=held_out, checks=checks)
