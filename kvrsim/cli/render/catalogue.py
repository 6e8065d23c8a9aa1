"""The profiles, models and clusters that ship, and the published cases, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvrsim.cli.render.layout import columns, show
from kvrsim.units import format_bandwidth, format_bytes, format_seconds, format_tokens

if TYPE_CHECKING:
    from kvrsim.hardware.cluster import Cluster
    from kvrsim.model.spec import ModelSpec
    from kvrsim.profile.profile import CalibrationProfile


def show_profiles(profiles: Sequence[CalibrationProfile]) -> None:
    """One row per profile."""
    table = columns("profile", "GPU", "attention", "held-out error")
    table.add_column("description")
    for profile in profiles:
        kernels = ", ".join(profile.attention_kernels)
        table.add_row(profile.name, profile.gpu, kernels, _left_out_error(profile), profile.description)
    show(table)


def _left_out_error(profile: CalibrationProfile) -> str:
    """Mean absolute held-out error: of whole TTFTs, or of matrix products and attention."""
    if profile.residual is not None:
        return f"TTFT {profile.residual.cross_validated_mape:.1%}"
    kinds = [(kind, profile.operations[kind]) for kind in ("gemm", "attention") if kind in profile.operations]
    return "\n".join(f"{kind} {fit.cross_validated_mape:.1%}" for kind, fit in kinds) or "unknown"


def show_models(models: Sequence[ModelSpec]) -> None:
    """One row per model."""
    table = columns("model", "architecture")
    columns("parameters", "layers", "hidden", "heads", "KV heads", "max context", numbers=True, into=table)
    for model in models:
        made_for = model.max_position_embeddings
        counts = (
            model.num_hidden_layers,
            model.hidden_size,
            model.num_attention_heads,
            model.num_key_value_heads,
            "" if made_for is None else format_tokens(made_for),
        )
        parameters = f"{model.num_parameters / 1e9:.1f} B"
        table.add_row(model.name, model.model_type, parameters, *map(str, counts))
    show(table)


def show_clusters(clusters: Mapping[str, Cluster]) -> None:
    """One row per cluster; bandwidth per direction."""
    table = columns("cluster", "GPUs", "memory", "topology", "link", "bandwidth", "latency")
    for name, cluster in clusters.items():
        gpu, link = cluster.gpu, cluster.link
        speed, latency = format_bandwidth(link.bandwidth_bytes_per_s), format_seconds(link.latency_s)
        gpus, memory = f"{cluster.num_gpus} × {gpu.name}", format_bytes(gpu.memory_bytes)
        table.add_row(name, gpus, memory, cluster.topology, link.name, speed, latency)
    show(table)


def show_validation(result: Mapping[str, Any]) -> None:
    """One row per published case, and the errors of the groups."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title in ("source", "case"):
        table.add_column(title)
    columns("reported", "simulated", "error", "calibration", numbers=True, into=table)
    for row in result["rows"]:
        times = (format_seconds(row["reported_s"]), format_seconds(row["simulated_s"]))
        used = "used" if row["used_for_calibration"] else "held out"
        table.add_row(row["source"], row["case"], *times, f"{row['rel_error']:+.1%}", used)
    groups = ("calibration", "held_out", "all")
    show(table, "", *(_errors(group, result[group]) for group in groups if group in result))


def _errors(group: str, errors: Mapping[str, Any]) -> str:
    """One line of a group's count and errors."""
    shown = (f"{key} {value:.1%}" if isinstance(value, float) else f"{key} {value}" for key, value in errors.items())
    return f"{group.replace('_', ' ')}: {', '.join(shown)}"
