"""Check public names against a recorded file; `KVRSIM_RECORD=1 make test` records them."""

from __future__ import annotations

import json
import os
from pathlib import Path

RECORD = "KVRSIM_RECORD"


def assert_recorded(path: Path, names: dict[str, list[str]]) -> None:
    """The names of each group must be those of the file; with KVRSIM_RECORD set, write the file first."""
    if os.environ.get(RECORD):
        lines = [f"  {json.dumps(group)}: {json.dumps(group_names)}" for group, group_names in names.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert names == recorded, f"public names changed; to record them: {RECORD}=1 make test"
