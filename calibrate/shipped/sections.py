"""Sections of a profile's kernels that have tables of their own: experts, recurrences, latent and sparse attention.

Each is fitted by itself, from what recipes.json has under "sections", and leaves the rest of the profile as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from calibrate.fit.layers.experts import fit_experts_section
from calibrate.fit.layers.latent import fit_latent_section
from calibrate.fit.layers.recurrence import fit_recurrence_section
from calibrate.fit.layers.sparse import fit_sparse_section
from calibrate.fit.solver import Fitted
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import OPERATION_KINDS, CalibrationProfile

SectionFit = Callable[[JsonObject, CalibrationProfile], Fitted[Any]]

# By the name of the field of KernelRates, which is the kind of operation too; the rates have a method `describe()`.
SECTIONS: Mapping[str, SectionFit] = MappingProxyType(
    {
        "experts": fit_experts_section,
        "latent": fit_latent_section,
        "sparse": fit_sparse_section,
        "recurrence": fit_recurrence_section,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WithSections:
    """A profile with sections, and how well each one fits."""

    profile: CalibrationProfile
    fitted: Mapping[str, Fitted[Any]] = field(default_factory=dict)


def fit_sections(
    profile: CalibrationProfile,
    recipe: JsonObject,
    only: Collection[str] | None = None,
    fits: Mapping[str, SectionFit] = SECTIONS,
) -> WithSections:
    """The profile with the sections that the recipe lists, or only some of these; InputError for what is unknown."""
    listed = recipe.child("sections") if recipe.has("sections") else JsonObject(fields={}, where=recipe.where)
    listed.only(tuple(fits))
    wanted = [name for name in fits if listed.has(name) and (only is None or name in only)]
    for name in only or ():
        if name not in fits:
            raise InputError("only", name, ", ".join(fits))
    fitted = {name: fits[name](listed.child(name), profile) for name in wanted}
    found = dict(profile.operations) | {name: one.operation for name, one in fitted.items()}
    return WithSections(
        profile=replace(
            profile,
            kernels=replace(profile.kernels, **{name: one.rates for name, one in fitted.items()}),
            operations={kind: found[kind] for kind in OPERATION_KINDS if kind in found},
        ),
        fitted=fitted,
    )
