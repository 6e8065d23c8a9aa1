"""How many examples a law is tried with: few in the edit loop, all before a commit, more at night.

quick    `make test`: a third of each law's examples, always the same
full     `make test-all` and CI: all of them, always the same
nightly  `make nightly`: five times as many, drawn from a seed that is printed
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_EFFORT = {"quick": 1 / 3, "full": 1.0, "nightly": 5.0}
_LEAST = 5


def register_profiles() -> None:
    """Make the profiles known to `pytest --hypothesis-profile`, and `quick` the default."""
    for name in _EFFORT:
        settings.register_profile(
            name,
            deadline=None,
            derandomize=name != "nightly",
            database=None,
            max_examples=_examples(100, name),
            print_blob=name == "nightly",
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
        )
    settings.load_profile("quick")


def examples(full: int) -> settings:
    """So many examples of a law in CI; the profile in use says how many now."""
    return settings(max_examples=_examples(full, settings.get_current_profile_name()))


def _examples(full: int, profile: str) -> int:
    return max(min(full, _LEAST), round(full * _EFFORT.get(profile, 1.0)))
