"""EngineTerms: the terms of an engine, and the clock, that are fitted to whole prefills, and their priors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from calibrate.prefills.solve import Prior
from kvrsim.engine import PRIOR_ENGINE, TERMS, Engine, HostRates, load_engine
from kvrsim.errors import InputError
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.scenario import Scenario

KERNEL_SCALE = "kernel_scale"
SUSTAINED_SHARE = "sustained_share"  # of the profile's clock: its rate after long load over that of bursts
_CLOCK_LOG_SD = 0.03  # machines of one kind differ in cooling and power limit; more is left to kernel_scale
_HOST = {one.name for one in fields(HostRates)} & set(TERMS)
TOKEN_PRIOR = Prior(name="token_s", median=1e-6, log_sd=1.5)  # a tokeniser; a transfer of K and V takes some more
MODEL = "model"  # the spread that no term explains: estimated from the rows, not a term


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTerms:
    """An engine whose terms are to be fitted: its values are the priors' medians, its spreads their widths."""

    engine: Engine
    gpu: str  # of the profile, whose kernels are scaled
    priors: tuple[Prior, ...]

    @classmethod
    def of(cls, profile: CalibrationProfile, engine: Engine | None, *, lengths: bool = False) -> EngineTerms:
        """The terms that have both a value and a spread; InputError where none has.

        engine: the prior; None: PRIOR_ENGINE.
        lengths: whether the rows span lengths, which may show seconds a token that the prior does not know of.
        """
        base = load_engine(PRIOR_ENGINE) if engine is None else engine
        priors = []
        for name in TERMS:
            log_sd = base.spread.get(name, 0.0)
            median = base.scale_on(profile.gpu) if name == KERNEL_SCALE else getattr(base.host, name, 0.0)
            if name != MODEL and log_sd > 0 and median > 0:
                priors.append(Prior(name=name, median=median, log_sd=log_sd))
        if not priors:
            raise InputError("engine", base.name, f"an engine with terms that have a spread, such as {PRIOR_ENGINE}")
        if profile.kernels.clock is not None:
            share = profile.kernels.clock.sustained_share
            priors.append(Prior(name=SUSTAINED_SHARE, median=share, log_sd=_CLOCK_LOG_SD))
        if lengths and base.host.token_s == 0:
            priors.append(TOKEN_PRIOR)
        priors.sort(key=lambda prior: (*TERMS, SUSTAINED_SHARE).index(prior.name))
        return cls(engine=base, gpu=profile.gpu, priors=tuple(priors))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the terms, in the order of the priors."""
        return tuple(prior.name for prior in self.priors)

    def engine_with(self, values: Mapping[str, float]) -> Engine:
        """The engine with these values of its terms."""
        host = {name: value for name, value in values.items() if name in _HOST}
        scale = {self.gpu: values[KERNEL_SCALE]} if KERNEL_SCALE in values else self.engine.kernel_scale
        return replace(self.engine, host=replace(self.engine.host, **host), kernel_scale=scale)

    def scenario_with(self, scenario: Scenario, values: Mapping[str, float]) -> Scenario:
        """The scenario served by an engine, on a device with a clock, with these values."""
        profile = scenario.profile and with_clock(scenario.profile, values)
        return replace(scenario, engine=self.engine_with(values), profile=profile)


def with_clock(profile: CalibrationProfile, values: Mapping[str, float]) -> CalibrationProfile:
    """The profile with the clock's share from these values; at most 1."""
    kernels = profile.kernels
    if kernels.clock is None or SUSTAINED_SHARE not in values:
        return profile
    clock = replace(kernels.clock, sustained_share=min(1.0, values[SUSTAINED_SHARE]))
    return replace(profile, kernels=replace(kernels, clock=clock))
