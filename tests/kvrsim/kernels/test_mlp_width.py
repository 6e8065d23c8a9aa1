"""Features between the matrices of an MLP, which activations read and write: of experts in a latent, of shared ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrsim.kernels.layer import mlp_width
from tests.kvrsim.model.architectures.test_hybrids import HYBRID, K3, NEXT
from tests.kvrsim.model.architectures.test_latent import M3, V3, V4
from tests.kvrsim.model.model_configs import load


@pytest.mark.parametrize(
    ("config", "routed", "shared"),
    [
        ({**V3, "n_shared_experts": 3}, 24, 3 * 24),
        (V4, 24, 24),
        (M3, 24, 40),
        (NEXT, 24, 40),
        ({**HYBRID, "hybrid_override_pattern": "ME"}, 24, 40),
        ({**HYBRID, "hybrid_override_pattern": "ME", "moe_latent_size": 20}, 24, 40),
        (K3, 24, 2 * 24),
    ],
    ids=["deepseek_v3", "deepseek_v4", "minimax_m3", "qwen3_next", "nemotron_h", "nemotron_h latent", "kimi_k3"],
)
def test_widths(tmp_path: Path, config: dict[str, Any], routed: int, shared: int) -> None:
    layer = load(tmp_path, config).layers[-1]
    assert (mlp_width(layer.mlp), mlp_width(layer.shared_mlp)) == (routed, shared)


def test_no_shared_expert_has_no_width(tmp_path: Path) -> None:
    layer = load(tmp_path, V3).layers[0]
    assert (mlp_width(layer.mlp), mlp_width(layer.shared_mlp)) == (96, 0)
