"""The runtime's tests need torch; their helpers must be importable in the processes that they start."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if find_spec("torch") is None or find_spec("transformers") is None:  # the hardware extra
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    torch.set_num_threads(1)  # tiny models only lose by more
