"""Write docs/results/profiles.md, the page of the profiles that ship: `python -m calibrate.shipped.page`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calibrate.fit.report import TITLES
from kvrsim.engine import PRIOR_ENGINE
from kvrsim.io.files import write_atomically
from kvrsim.kernels.profile import CalibrationProfile, builtin_profiles, load_profile
from kvrsim.text import markdown_table
from kvrsim.units import format_seconds, format_tokens

_TEXT = Path(__file__).with_suffix(".md")
PAGE = Path(__file__).parents[2] / "docs" / "results" / "profiles.md"


def page(profiles: Sequence[CalibrationProfile]) -> str:
    """The content of docs/results/profiles.md."""
    return _TEXT.read_text("utf-8").replace("{profiles}\n", "\n".join(map(_section, profiles)))


def write_page() -> None:
    """Rewrite the page from the profiles as they are."""
    write_atomically(PAGE, page([load_profile(name) for name in builtin_profiles()]).encode(), argument="page")


def _section(profile: CalibrationProfile) -> str:
    """One profile: what it is for, where it holds, how well."""
    measured = ((kind, fit) for kind, fit in profile.operations.items() if fit.num_rows)
    rows = (
        (TITLES[kind], fit.num_rows, f"{fit.mape:.1%}", f"{fit.cross_validated_mape:.1%}") for kind, fit in measured
    )
    prefills = [] if profile.residual is None else [f"- **Whole prefills**: {_prefills(profile)}"]
    lines = [
        f"## {profile.name}",
        "",
        f"{profile.description[0].upper()}{profile.description[1:]}",
        "",
        f"- **Not covered**: {profile.not_covered}",
        f"- **Range**: {_range(profile)}",
        f"- **Host clock**: {_host(profile)}",
        *prefills,
        f"- **More**: {_links(profile)}",
        "",
        markdown_table(("operation", "rows", "error", "held out"), rows),
    ]
    return "\n".join(lines) + "\n"


def _range(profile: CalibrationProfile) -> str:
    valid = profile.valid
    low, high = map(format_tokens, valid.context_len)
    parts = [
        f"GPU {profile.gpu}",
        f"contexts of {_span(low, high)} tokens",
        f"{_span(*map(str, valid.num_gpus))} GPUs",
        f"hidden size {_span(*map(str, valid.hidden_size))}",
        f"head_dim {_span(*map(str, valid.head_dim))}",
        " and ".join(valid.dtypes),
    ]
    return ", ".join(parts)


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _host(profile: CalibrationProfile) -> str:
    """How long, and how it is known; or which engine stands instead."""
    if profile.engine == PRIOR_ENGINE:
        return f"engine `{profile.engine}`"
    host, known = profile.host, profile.operations.get("host")
    parts = {
        "a layer": host.layer_s,
        "a kernel of it": host.kernel_s,
        "a gathering rank": host.gather_piece_s,
        "a message": host.message_s,
        "to resume after communication": host.resume_s,
    }
    listed = (f"{format_seconds(seconds)} {what}" for what, seconds in parts.items() if seconds or what == "a layer")
    return f"{', '.join(listed)}; {known.source if known else 'fitted to whole prefills'}"


def _prefills(profile: CalibrationProfile) -> str:
    """Errors on TTFTs, and what the table of operations is then."""
    residual = profile.residual
    assert residual is not None
    return (
        f"mean error {residual.mape:.1%} on the {residual.num_rows} published TTFTs of the fit,"
        f" {residual.cross_validated_mape:.1%} with one model left out at a time; the operations below were measured"
        f" apart from them ({profile.provenance['measured']})"
    )


def _links(profile: CalibrationProfile) -> str:
    """Pages about it."""
    if profile.residual is not None:
        return "[every published TTFT beside its prediction](accuracy.md)"
    return f"[each operation, with a picture](profiles/{profile.name}.md)"


if __name__ == "__main__":
    write_page()
