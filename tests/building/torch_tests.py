"""Tests that need torch and transformers, the extra `hardware`."""

from importlib.util import find_spec


def ignored_without_torch() -> list[str]:
    """For a conftest's collect_ignore_glob; where torch is installed, it runs in one thread."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        return ["test_*.py"]
    import torch

    torch.set_num_threads(1)  # tiny models are slower with more
    return []
