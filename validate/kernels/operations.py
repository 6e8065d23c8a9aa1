"""The accuracy page's part on operations: errors by kind of operation and profile."""

from __future__ import annotations

from kvrsim.profile.profile import OPERATION_KINDS, builtin_profiles, load_profile

_TITLES = {
    "gemm": "matrix products",
    "attention": "attention",
    "latent": "latent attention",
    "sparse": "sparse attention",
    "experts": "experts",
    "recurrence": "recurrences",
    "elementwise": "element-wise",
    "send_recv": "messages",
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
}
_ABOUT = """## 3. Operations

Mean absolute error of each kind of operation on measured kernels that its fit had not seen, by profile; in brackets the
number of measurements. [profiles.md](profiles.md) says where they come from, [kernel_sums.md](kernel_sums.md) compares
sums of kernels with whole prefills, [rings.md](rings.md) rings of attention on 8 GPUs with published ones.
`kvrsim profiles show NAME` prints everything in a profile. "-": not measured."""


def part() -> list[str]:
    """Markdown lines."""
    profiles = [profile for profile in map(load_profile, builtin_profiles()) if profile.operations]
    measured = {kind for profile in profiles for kind, fit in profile.operations.items() if fit.num_rows}
    kinds = [kind for kind in OPERATION_KINDS if kind in measured]
    lines = [*_ABOUT.splitlines(), ""]
    lines += [f"| profile | {' | '.join(_TITLES.get(kind, kind) for kind in kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for profile in profiles:
        fits = [profile.operations.get(kind) for kind in kinds]
        cells = [f"{fit.cross_validated_mape:.1%} ({fit.num_rows})" if fit and fit.num_rows else "-" for fit in fits]
        lines.append(f"| {profile.name} | {' | '.join(cells)} |")
    return [*lines, ""]
