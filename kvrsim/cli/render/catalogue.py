"""The profiles, models and clusters that ship, and the published cases, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from kvrsim.cli.render.layout import columns, facts, show
from kvrsim.model.describe import describe_mixers, describe_parameters, mixer_title
from kvrsim.model.mixers import Attention, LatentAttention, Mixer, Recurrence
from kvrsim.units import format_bandwidth, format_bytes, format_seconds, format_tokens

if TYPE_CHECKING:
    from kvrsim.hardware import Cluster
    from kvrsim.kernels.profile import CalibrationProfile
    from kvrsim.model.gemm import Gemm
    from kvrsim.model.spec import LayerSpec, ModelSpec


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
    """One row per model; below, what of some is approximated."""
    table = columns("model", "family")
    columns("parameters", "active", "context", numbers=True, into=table)
    table.add_column("layers")
    approximated: dict[str, list[str]] = {}
    for model in models:
        active = model.active_parameters
        table.add_row(
            model.name,
            model.model_type.removesuffix("_text"),
            describe_parameters(model.num_parameters),
            describe_parameters(active) if active < model.num_parameters else "",
            _context(model),
            describe_mixers(model),
        )
        for sentence in model.approximations:
            approximated.setdefault(sentence, []).append(model.name)
    notes = [f"{sentence}: {', '.join(names)}" for sentence, names in approximated.items()]
    show(table, *(["", *notes] if notes else []))


def show_model(model: ModelSpec) -> None:
    """Its numbers in words, then each kind of layer with its matrices."""
    table, active = facts(), model.active_parameters
    some = "" if active == model.num_parameters else f", of which a token passes through {describe_parameters(active)}"
    quantised = "" if model.quantization is None else f" ({model.quantization.describe()})"
    rows = {
        "family": model.model_type,
        "parameters": f"{describe_parameters(model.num_parameters)} ({model.num_parameters:,}){some}",
        "layers": f"{model.num_hidden_layers}: {describe_mixers(model)}",
        "context": _context(model) or "not stated",
        "hidden size": f"{model.hidden_size}",
        "vocabulary": f"{model.vocab_size}{', head tied to the embedding' if model.tie_word_embeddings else ''}",
        "weights": f"{format_bytes(model.weight_bytes(2))}{quantised}",
        "cache": f"{format_bytes(model.kv_bytes_per_token(2))} a token{_state(model)}",
        "approximated": "\n".join(model.approximations) or "nothing",
    }
    for label, text in rows.items():
        table.add_row(label, text)
    for kind in model.layer_kinds:
        table.add_row("", "")
        table.add_row(f"{model.layers.count(kind)} layers", mixer_title(kind))
        for label, text in _layer_rows(kind):
            table.add_row(f"  {label}", text)
    show(Text(model.name, style="bold"), table)


def _context(model: ModelSpec) -> str:
    made_for = model.max_position_embeddings
    return "" if made_for is None else format_tokens(made_for)


def _state(model: ModelSpec) -> str:
    """Of recurrences, which keep the same whatever the tokens."""
    state = model.cache_bytes(0, 2)
    return f", and {format_bytes(state)} whatever the tokens" if state else ""


def _layer_rows(kind: LayerSpec) -> Iterator[tuple[str, str]]:
    """Label and text of what a kind of layer consists of."""
    if kind.mixer is not None:
        yield "heads", _heads(kind.mixer)
        yield "matrices", _matrices(kind.mixer.matrices)
    if kind.num_experts:
        yield "experts", f"{kind.num_experts}, of which a token passes through {kind.num_experts_per_tok}"
        yield "an expert", _matrices(kind.mlp)
    elif kind.mlp:
        yield "MLP", _matrices(kind.mlp)
    if kind.shared_mlp:
        yield "all tokens", _matrices(kind.shared_mlp)
    yield "parameters", f"{kind.num_parameters:,}"


def _heads(mixer: Mixer) -> str:
    if isinstance(mixer, Recurrence):
        keys = f"{mixer.num_key_heads} of keys, {mixer.key_head_dim} wide"
        return f"{keys}; {mixer.num_value_heads} of values, {mixer.value_head_dim} wide"
    heads = f"{mixer.num_attention_heads} of queries, {mixer.head_dim} wide"
    if isinstance(mixer, Attention):
        wide = "" if mixer.v_head_dim == mixer.head_dim else f", values {mixer.v_head_dim} wide"
        return f"{heads}; {mixer.num_key_value_heads} of keys and values{wide}"
    if isinstance(mixer, LatentAttention):
        return f"{heads}, values {mixer.v_head_dim} wide; a latent of {mixer.kv_lora_rank} a token"
    return f"{heads}; one of keys that are values"


def _matrices(gemms: Sequence[Gemm]) -> str:
    """Names and widths, and the bits of quantised weights."""
    return "\n".join(
        f"{gemm.name} {gemm.in_features} to {gemm.out_features}"
        + (" with bias" if gemm.bias else "")
        + (f", {gemm.groups} groups" if gemm.groups > 1 else "")
        + (f", {gemm.weights.bits} bits" if gemm.weights else "")
        for gemm in gemms
    )


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
