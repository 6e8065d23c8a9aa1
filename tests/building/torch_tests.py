"""Conditions for tests that need torch and transformers, which the extra `hardware` installs."""

from importlib.util import find_spec


def ignored_without_torch() -> list[str]:
    """Patterns for a conftest's collect_ignore_glob if torch is missing; otherwise set torch to one thread."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        return ["test_*.py"]
    import torch

    torch.set_num_threads(1)  # tiny models are slower with more threads
    return []
