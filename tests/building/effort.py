"""Number of examples per law: few while editing, more before a commit, most at night.

quick    `make test`: an eighth of the number in the test, the same examples in every run
full     `make test-all` and CI: a quarter of the number, the same examples in every run
nightly  `make nightly`: five times the number, from a random seed that is printed
mutation `benchmarks/mutation.py`: as full, but without shrinking failures
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

_EFFORT = {"quick": 1 / 8, "full": 1 / 4, "nightly": 5.0, "mutation": 1 / 2}
_LEAST = 3


def register_profiles() -> None:
    """Register the profiles for `pytest --hypothesis-profile`, with `quick` as the default."""
    for name in _EFFORT:
        settings.register_profile(
            name,
            deadline=None,
            derandomize=name != "nightly",
            database=None,
            max_examples=_examples(100, name),
            print_blob=name == "nightly",
            phases=[phase for phase in Phase if name != "mutation" or phase in (Phase.explicit, Phase.generate)],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
        )
    settings.load_profile("quick")


def examples(count: int) -> settings:
    """Settings with `count` examples, multiplied by the effort of the current profile."""
    return settings(max_examples=_examples(count, settings.get_current_profile_name()))


def _examples(count: int, profile: str) -> int:
    return max(min(count, _LEAST), round(count * _EFFORT.get(profile, 1.0)))
