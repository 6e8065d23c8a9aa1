"""Write docs/results/profiles.md, the page of the profiles that ship: `python -m validate.profiles`."""

from __future__ import annotations

from collections.abc import Sequence

from calibrate.fit.profile import TITLES
from kvrsim.kernels.profile import CalibrationProfile, builtin_profiles, load_profile
from kvrsim.text import markdown_table
from kvrsim.units import format_tokens
from validate.report import RESULTS, fill, write_page

PAGE = RESULTS / "profiles.md"


def page(profiles: Sequence[CalibrationProfile]) -> list[str]:
    """Lines of the page."""
    return fill("profiles", profiles=list(map(_about, profiles)), errors=_errors(profiles))


def _about(profile: CalibrationProfile) -> str:
    """Describe a profile: its range of validity, and what it does not cover."""
    low, high = map(format_tokens, profile.valid.context_len)
    fewest, most = profile.valid.num_gpus
    where = f"{profile.gpu}, {low} to {high} tokens, {fewest} to {most} GPUs, {' and '.join(profile.valid.dtypes)}"
    return f"- **{profile.name}** ({where}): {profile.not_covered}"


def _errors(profiles: Sequence[CalibrationProfile]) -> str:
    """Table of held-out errors: one row per profile, and one column per operation that a profile measured."""
    measured = {
        profile.name: {kind for kind, fit in profile.operations.items() if fit.num_rows} for profile in profiles
    }
    kinds = [kind for kind in TITLES if any(kind in errors for errors in measured.values())]
    rows = []
    for profile in profiles:
        cells = [profile.name]
        for kind in kinds:
            if kind in measured[profile.name]:
                cells.append(f"{profile.operations[kind].cross_validated_mape:.1%}")
            else:
                cells.append("")
        rows.append(cells)
    return markdown_table(("profile", *(TITLES[kind] for kind in kinds)), rows)


if __name__ == "__main__":
    write_page(PAGE, page([load_profile(name) for name in builtin_profiles()]))
