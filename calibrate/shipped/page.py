"""Write docs/results/profiles.md, the page of the profiles that ship: `python -m calibrate.shipped.page`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calibrate.fit.report import TITLES
from kvrsim.io.files import write_atomically
from kvrsim.kernels.profile import CalibrationProfile, builtin_profiles, load_profile
from kvrsim.text import markdown_table
from kvrsim.units import format_tokens

_TEXT = Path(__file__).with_suffix(".md")
PAGE = Path(__file__).parents[2] / "docs" / "results" / "profiles.md"


def page(profiles: Sequence[CalibrationProfile]) -> str:
    """The content of docs/results/profiles.md."""
    text = _TEXT.read_text("utf-8").replace("{profiles}", "\n".join(map(_about, profiles)))
    return text.replace("{errors}", _errors(profiles))


def write_page() -> None:
    """Rewrite the page from the shipped profiles."""
    write_atomically(PAGE, page([load_profile(name) for name in builtin_profiles()]).encode(), argument="page")


def _about(profile: CalibrationProfile) -> str:
    """One profile: where it holds, and what it does not cover."""
    low, high = map(format_tokens, profile.valid.context_len)
    fewest, most = profile.valid.num_gpus
    where = f"{profile.gpu}, {low} to {high} tokens, {fewest} to {most} GPUs, {' and '.join(profile.valid.dtypes)}"
    return f"- **{profile.name}** ({where}): {profile.not_covered}"


def _errors(profiles: Sequence[CalibrationProfile]) -> str:
    """Held-out errors: a row per profile, a column per operation that any of them measured."""
    measured = {
        profile.name: {kind for kind, fit in profile.operations.items() if fit.num_rows} for profile in profiles
    }
    kinds = [kind for kind in TITLES if any(kind in found for found in measured.values())]
    rows = [
        [
            profile.name,
            *(
                f"{profile.operations[kind].cross_validated_mape:.1%}" if kind in measured[profile.name] else ""
                for kind in kinds
            ),
        ]
        for profile in profiles
    ]
    return markdown_table(("profile", *(TITLES[kind] for kind in kinds)), rows)


if __name__ == "__main__":
    write_page()
