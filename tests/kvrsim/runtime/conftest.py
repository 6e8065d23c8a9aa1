"""These tests need torch."""

from tests.building.torch_tests import ignored_without_torch

collect_ignore_glob = ignored_without_torch()
