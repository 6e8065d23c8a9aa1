"""Commands for shipped names: `kvrsim strategies`, `models`, `clusters`, `profiles`, `engines`, with list and show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from kvrsim.arguments import Help
from kvrsim.cli.help import CommandGroup
from kvrsim.cli.options import Json, OutputArgs, with_options
from kvrsim.cli.output import print_answer, print_json
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Part, facts, show, show_tree
from kvrsim.engine import DEVIATES_OF_80_PERCENT, PRIOR_ENGINE, SHORT_TOKENS
from kvrsim.error_rule import OTHER_ENGINE, error_rule
from kvrsim.units import format_bandwidth, format_bytes, format_seconds, format_tokens
from kvrsim.views.table import Text, columns

if TYPE_CHECKING:
    from kvrsim.engine import Engine
    from kvrsim.kernels.profile import CalibrationProfile
    from kvrsim.model.gemm import Gemm
    from kvrsim.model.spec import LayerSpec, ModelSpec
    from kvrsim.strategies import Strategy

_NUMBERS = ("parameters", "active", "context", "before", "layer")  # columns that are aligned to the right


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """Loader and printers for one kind of shipped items, such as models."""

    names: Iterable[str]
    load: Callable[..., Any]  # loads an item by name or path; errors name `argument`
    to_json: Callable[[Any], dict[str, Any]]
    cells: Callable[[Any], dict[str, str]]  # a row of the list by the titles of its columns; prose comes last
    show: Callable[[Any], None]
    row: Callable[[Any], dict[str, Any]] | None = None  # JSON of an item in the list; None: to_json
    notes: Callable[[Sequence[Any]], Sequence[str]] = lambda things: ()  # notes that are printed below the list

    def list_screen(self, things: Sequence[Any]) -> list[Part]:
        """One row per item, and the notes."""
        rows = [self.cells(thing) for thing in things]
        *titles, last = rows[0]
        table = columns(*(f"{'>' * (title in _NUMBERS)}{title}" for title in titles), f"~{last}")
        for row in rows:
            table.add_row(*row.values())
        notes = self.notes(things)
        return [table, *([""] if notes else []), *notes]


def _commands(
    kind: str, shelf: Callable[[], Shelf], names: str, which: str, list_help: str, show_help: str
) -> CommandGroup:
    """Make the commands `list` and `show` of a kind; `names` and `which` are the metavar and the help of a name."""
    program = CommandGroup()

    def list_all(answer: OutputArgs) -> None:
        answer.check()
        items = shelf()
        things = [items.load(name, argument=names) for name in items.names]
        to_json = items.row or items.to_json
        print_answer(answer, lambda: {kind: list(map(to_json, things))}, kind, lambda: items.list_screen(things))

    def show_one(*, name: str, json: Json = False) -> None:
        items = shelf()
        thing = items.load(name, argument=names)
        if json:
            print_json(items.to_json(thing))
        else:
            items.show(thing)

    list_all.__doc__ = f"{list_help}\n\nExample: kvrsim {kind} list"
    show_one.__doc__ = show_help
    show_one.__annotations__["name"] = Annotated[str, Help(which, metavar=names, positional=True)]
    program.command("list")(with_options()(list_all))
    program.command("show")(with_options()(show_one))
    return program


# Strategies


def _strategies() -> Shelf:
    from kvrsim.strategies import STRATEGIES

    return Shelf(
        names=tuple(STRATEGIES),
        load=lambda name, argument: about(name),
        to_json=dict,
        cells=lambda strategy: {
            "strategy": strategy["name"],
            "runs here": "yes" if strategy["runs_here"] else "",
            "engines": ", ".join(strategy["engines"]),
            "what it is": strategy["title"],
        },
        notes=lambda _: (
            "runs here: kvrsim run and confirm run it on real ranks; engines: some model can be launched with it there",
            "hybrids: tpN+NAME, and sizes such as tp4+pp2+cp2; kvrsim strategies show NAME says more",
        ),
        show=show_strategy,
    )


strategies = _commands(
    "strategies",
    _strategies,
    "NAME|FILE.py:NAME",
    "A strategy or a hybrid, such as tp8+kvr-s.",
    "List the strategies.",
    """Print one strategy: what ranks compute, send and hold.

    Also prints which engines have it, and whether kvrsim run runs it.

    Example: kvrsim strategies show zigzag
    """,
)

_RULES = {
    "whole": "one rank computes the whole context",
    "even": "even shares of the context",
    "search": "searched shares of the context",
    "table": "shares of the context, looked up in a partition table",
    "pieces": "even pieces of the context, one after another",
    "searched-pieces": "searched pieces of the context, one after another",
}


def show_strategy(one: Mapping[str, Any]) -> None:
    """Print what each rank computes, sends and holds, and which engines run the strategy."""
    rows = {
        "partition": _RULES[one["partition_rule"]],
        "each rank": one["each_rank"],
        "communication": one["communication"],
        "each rank holds": one["holds"],
        "kvrsim plan": "compares it by default" if one["planned_by_default"] else "compares it by --strategies",
        "kvrsim run": "runs it" if one["runs_here"] else "does not run it",
        "engines": ", ".join(one["engines"]) or "none that was looked at",
        "source": one["source"],
        "more": one["docs"],
    }
    show(f"{one['name']}: {one['title']}", "", facts(*rows.items()))


def about(name: str) -> dict[str, Any]:
    """A strategy as JSON, with the fields of docs/reference/json.md. Raises InputError if there is no such strategy."""
    from kvrsim.runtime.plan import RUN_STRATEGIES
    from kvrsim.strategies import get_strategy
    from planner.deploy_engines import engines_for

    strategy = get_strategy(name, "NAME|FILE.py:NAME")
    words = _words(strategy)
    return {
        "name": strategy.name,
        "title": strategy.title,
        "partition_rule": strategy.partition_rule,
        **{key: words.get(key) for key in ("each_rank", "communication", "holds")},
        "engines": list(engines_for(strategy)),
        "runs_here": strategy.name in RUN_STRATEGIES,
        "planned_by_default": strategy.partition_rule != "table",
        "source": strategy.source,
        "docs": words.get("docs"),
    }


def _words(strategy: Strategy) -> Mapping[str, Any]:
    """Texts of a strategy by name; tp2+ring has those of ring, with those of groups. Strategies of users have none."""
    from kvrsim.strategies import STRATEGIES

    shipped = STRATEGIES.get(strategy.name)
    if shipped is not None or strategy.group_size in (None, 1):
        return _shipped_words(shipped)
    rank = f"a rank is {strategy.group_size} GPUs that split every matrix"
    all_reduces = "two all-reduces in each group in each layer"
    between = _shipped_words(STRATEGIES.get(strategy.name.rpartition("+")[2]))
    if not between:
        docs = "docs/explanation/strategies.md"
        return {"each_rank": rank, "communication": all_reduces, "holds": None, "docs": docs}
    return {
        "each_rank": f"{rank}; {between['each_rank']}",
        "communication": f"{between['communication']}; {all_reduces}",
        "holds": f"{between['holds']}; of them a GPU 1 / {strategy.group_size}",
        "docs": between["docs"],
    }


def _shipped_words(strategy: Strategy | None) -> Mapping[str, Any]:
    if strategy is None or strategy.words is None:
        return {}
    return strategy.words._asdict()


# Models


def _models() -> Shelf:
    from kvrsim.model.load import builtin_models, load_model, own_models
    from kvrsim.model.spec import describe_mixers, describe_parameters

    def notes(models: Sequence[ModelSpec]) -> list[str]:
        sentences = dict.fromkeys(sentence for model in models for sentence in model.approximations)
        return [
            f"{sentence}: {', '.join(model.name for model in models if sentence in model.approximations)}"
            for sentence in sentences
        ]

    def load(name: str, argument: str) -> ModelSpec:
        with Progress() as progress:
            return load_model(name, argument, on_progress=progress)

    return Shelf(
        names=(*builtin_models(), *own_models()),
        load=load,
        to_json=summary,
        cells=lambda model: {
            "model": model.name,
            "family": model.model_type.removesuffix("_text"),
            "parameters": describe_parameters(model.num_parameters),
            "active": ""
            if model.active_parameters == model.num_parameters
            else describe_parameters(model.active_parameters),
            "context": _context(model),
            "layers": describe_mixers(model),
        },
        notes=notes,
        show=show_model,
    )


models = _commands(
    "models",
    _models,
    "NAME|PATH",
    "A built-in model, a config.json, or its folder.",
    "List the built-in models.",
    """Print one model: parameters, kinds of layers, cache.

    Also prints which parts of the model are approximated.

    Example: kvrsim models show llama-3-8b
    """,
)


@models.command("add")
@with_options()
def models_add(
    *,
    source: Annotated[
        str,
        Help("A config.json, its folder, or a Hugging Face id on this disk.", metavar="CONFIG|FOLDER", positional=True),
    ],
    name: Annotated[str | None, Help("Name of the model. Default: the name of the folder.", metavar="NAME")] = None,
    json: Json = False,
) -> None:
    """Add a model to your own catalogue.

    The command reads it once; later commands take its name and need neither the file nor torch.

    Example: kvrsim models add path/to/config.json --name my-model
    """
    from kvrsim.model.load import add_model

    with Progress() as progress:
        model, folder = add_model(source, name, on_progress=progress)
    if json:
        print_json(summary(model) | {"folder": str(folder)})
        return
    show_model(model)
    show("", f"added as {model.name} in {folder}")


def show_model(model: ModelSpec) -> None:
    """Print the model's numbers, then each kind of layer with its matrices."""
    from kvrsim.model.spec import describe_mixers, describe_parameters, mixer_title

    active = model.active_parameters
    state = model.cache_bytes(0, 2)
    some = "" if active == model.num_parameters else f", of which a token passes through {describe_parameters(active)}"
    quantised = "" if model.quantization is None else f" ({model.quantization.describe()})"
    state_text = f", and {format_bytes(state)} whatever the tokens" if state else ""
    rows = {
        "family": model.model_type,
        "parameters": f"{describe_parameters(model.num_parameters)} ({model.num_parameters:,}){some}",
        "layers": f"{model.num_hidden_layers}: {describe_mixers(model)}",
        "context": _context(model) or "not stated",
        "hidden size": f"{model.hidden_size}",
        "vocabulary": f"{model.vocab_size}{', head tied to the embedding' if model.tie_word_embeddings else ''}",
        "weights": f"{format_bytes(model.weight_bytes(2))}{quantised}",
        "cache": f"{format_bytes(model.kv_bytes_per_token(2))} per token{state_text}",
        "approximated": "\n".join(model.approximations) or "nothing",
    }
    if model.from_class:
        rows["read"] = "from transformers' class, in tens of seconds; kvrsim models add stores it for later commands"
    table = facts(*rows.items())
    for kind in model.layer_kinds:
        table.rows += [("", ""), (f"{model.layers.count(kind)} layers", mixer_title(kind))]
        table.rows += [(f"  {label}", text) for label, text in _layer_rows(kind)]
    show(Text(model.name, style="bold"), table)


def _context(model: ModelSpec) -> str:
    made_for = model.max_position_embeddings
    return "" if made_for is None else format_tokens(made_for)


def _layer_rows(kind: LayerSpec) -> Iterator[tuple[str, str]]:
    """Label and text of each part of a kind of layer."""
    if kind.mixer is not None:
        numbers = {one.name: getattr(kind.mixer, one.name) for one in fields(kind.mixer)}
        yield "shape", ", ".join(f"{name} {value}" for name, value in numbers.items() if type(value) is int)
        yield "matrices", _matrices(kind.mixer.matrices)
    if kind.num_experts:
        yield "experts", f"{kind.num_experts}, of which a token passes through {kind.num_experts_per_tok}"
    if kind.mlp:
        yield "an expert" if kind.num_experts else "MLP", _matrices(kind.mlp)
    if kind.shared_mlp:
        yield "all tokens", _matrices(kind.shared_mlp)
    yield "parameters", f"{kind.num_parameters:,}"


def _matrices(gemms: Sequence[Gemm]) -> str:
    """Names and widths of matrices, and the bits of quantised weights."""
    return "\n".join(
        f"{gemm.name} {gemm.in_features} to {gemm.out_features}"
        + (" with bias" if gemm.bias else "")
        + (f", {gemm.groups} groups" if gemm.groups > 1 else "")
        + (f", {gemm.weights.bits} bits" if gemm.weights else "")
        for gemm in gemms
    )


def summary(model: ModelSpec) -> dict[str, Any]:
    """A model's numbers as JSON values, with its layers by kind."""
    from kvrsim.io.schema import fields_to_json, to_json
    from kvrsim.model.spec import mixers_of

    own = [one.name for one in fields(model) if not one.name.startswith("layer")]
    derived = ("num_attention_heads", "num_key_value_heads", "head_dim", "num_parameters", "active_parameters")
    kinds = []
    for kind in model.layer_kinds:
        content = to_json(kind)
        if kind.mixer is not None:
            content["mixer"] |= {"kind": type(kind.mixer).__name__, "title": kind.mixer.title}
        kinds.append({"num_layers": model.layers.count(kind)} | content)
    return {
        **fields_to_json(model, *own, *derived),
        "weight_bytes": model.weight_bytes(2),
        "kv_bytes_per_token": model.kv_bytes_per_token(2),
        "state_bytes": model.cache_bytes(0, 2),
        "mixers": [{"mixer": title, "num_layers": count} for title, count in mixers_of(model).items()],
        "layer_kinds": kinds,
        "layer_kind_index": list(model.layer_kind_index),
    }


# Clusters


def _clusters() -> Shelf:
    from kvrsim.hardware import builtin_clusters, load_cluster
    from kvrsim.io.schema import to_json

    return Shelf(
        names=builtin_clusters(),
        load=load_cluster,
        to_json=to_json,
        cells=lambda cluster: {
            "cluster": cluster.name,
            "GPUs": f"{cluster.num_gpus} × {cluster.gpu.name}",
            "memory": format_bytes(cluster.gpu.memory_bytes),
            "topology": cluster.topology,
            "link": cluster.link.name,
            "bandwidth": format_bandwidth(cluster.link.bandwidth_bytes_per_s),  # per direction
            "latency": format_seconds(cluster.link.latency_s),
        },
        show=lambda cluster: show_tree(cluster.name, to_json(cluster)),
    )


clusters = _commands(
    "clusters",
    _clusters,
    "NAME|PATH",
    "A built-in cluster or a file.",
    "List the built-in clusters.",
    "Print one cluster: GPU, links and topology.\n\nExample: kvrsim clusters show h100-nvlink",
)


# Profiles


def _profiles() -> Shelf:
    from kvrsim.kernels.profile import builtin_profiles, load_profile

    return Shelf(
        names=builtin_profiles(),
        load=load_profile,
        to_json=lambda profile: profile.to_dict(),
        row=lambda profile: {
            "name": profile.name,
            "gpu": profile.gpu,
            "attention": list(profile.attention_kernels),
            "mape": profile.residual.mape if profile.residual else None,
            "description": profile.description,
        },
        cells=lambda profile: {
            "profile": profile.name,
            "GPU": profile.gpu,
            "attention": ", ".join(profile.attention_kernels),
            "held-out error": _left_out_error(profile),
            "description": profile.description,
        },
        show=show_profile,
    )


profiles = _commands(
    "profiles",
    _profiles,
    "NAME|PATH",
    "A built-in profile or a file.",
    "List the built-in profiles.",
    "Print one profile: rates, measured range, errors, sources.\n\nExample: kvrsim profiles show h100-flash",
)


def show_profile(profile: CalibrationProfile) -> None:
    """Print all values of a profile; its tables of measured products are summarised."""
    content = profile.to_dict()
    products = content["kernels"]["gemm"], *content["kernels"]["gemm_types"].values()
    rates = profile.kernels.gemm, *profile.kernels.gemm_types.values()
    for product, rate in zip(products, rates, strict=True):
        product["measured"] = [
            f"{one.in_features}→{one.out_features}: {len(one.rows)} row counts, {one.rows[0]} to {one.rows[-1]}"
            for one in rate.measured
        ]
    show_tree(profile.name, content)


def _left_out_error(profile: CalibrationProfile) -> str:
    """Mean absolute error on held-out data: of whole TTFTs, or of matrix products and attention."""
    if profile.residual is not None:
        return f"TTFT {profile.residual.cross_validated_mape:.1%}"
    kinds = [(kind, profile.operations[kind]) for kind in ("gemm", "attention") if kind in profile.operations]
    return "\n".join(f"{kind} {fit.cross_validated_mape:.1%}" for kind, fit in kinds) or "unknown"


# Engines


def _engines() -> Shelf:
    from kvrsim.engine import builtin_engines, load_engine
    from kvrsim.io.schema import to_json

    return Shelf(
        names=builtin_engines(),
        load=load_engine,
        to_json=to_json,
        cells=lambda engine: {
            "engine": engine.name,
            "before": format_seconds(engine.host.request_s + engine.host.step_s),
            "layer": format_seconds(engine.host.layer_s),
            "kernels": "\n".join(f"{gpu} {scale:.2f}" for gpu, scale in engine.kernel_scale.items()) or "1.00",
            "held-out": (engine.fit and f"{engine.fit.left_out_median_ape:.1%}, {engine.fit.left_out}s") or "",
            "what it is": engine.title,
        },
        notes=lambda _: (
            "before: seconds before the first layer; layer: host seconds of one layer; kernels: times the profile's;"
            " held-out: median error on prefills, rows or engines left out of the fit",
        ),
        show=show_engine,
    )


engines = _commands(
    "engines",
    _engines,
    "NAME|PATH",
    "A built-in engine or a file.",
    "List the built-in engines.",
    "Print one engine: its terms, errors and sources.\n\nExample: kvrsim engines show vllm-2023",
)

TERM_MEANINGS = {  # terms of an engine's record
    "request_s": "per request, before the first layer",
    "token_s": "per token of the request, before the first layer",
    "step_s": "per pass through the layers",
    "layer_s": "host, per layer",
    "kernel_s": "host, per kernel of a layer",
    "launch_s": "per kernel of a layer, in addition to its own time",
    "gather_piece_s": "host, per rank of an all-gather",
    "resume_s": "idle time of the GPU after the communication of a layer",
    "message_s": "host, per send or receive",
    "prepare_s": "host, per step",
    "collective_s": "per collective of tensor parallelism, in addition to its kernel",
    "kernel_scale": "seconds of kernels divided by those of the profile",
}


def show_engine(engine: Engine) -> None:
    """Print every term of an engine with its range, and the basis of the record."""
    table = columns("term", ">value", ">80 % range", "~meaning")
    for term, meaning in TERM_MEANINGS.items():
        for label, value in _values(engine, term):
            if value:
                table.add_row(label, _value_text(term, value), _range(term, value, engine.spread.get(term)), meaning)
    for term, log_sd, meaning in _ttft_errors(engine):
        half_width = DEVIATES_OF_80_PERCENT * log_sd
        table.add_row(term, "1", f"{math.exp(-half_width):.3g} to {math.exp(half_width):.3g}", meaning)
    first_token = "the prefill and one decode step" if engine.decode_step else "the prefill"
    lines = [
        f"{engine.name}: {engine.title}",
        engine.description,
        f"not covered: {engine.not_covered or 'nothing stated'}",
    ]
    rests = [f"{key}: {text}" for key, text in engine.provenance.items()]
    errors = [f"errors: {_engine_errors(engine)}"] if engine.fit is not None else []
    show(*lines, "", table, "", f"TTFT: includes {first_token}", *errors, *rests)


def _ttft_errors(engine: Engine) -> Iterator[tuple[str, float, str]]:
    """Yield what an interval of TTFT is made from: a name, a standard deviation of its logarithm, and its meaning."""
    if not engine.has_share_interval:
        if engine.rows_log_sd is not None:
            yield "TTFT", engine.rows_log_sd, "measured divided by predicted"
        return
    rule = error_rule()
    engine_s = rule.engine.get(engine.name.partition("@")[0], rule.engine[OTHER_ENGINE])
    if engine.name == PRIOR_ENGINE:
        engine_s = math.hypot(engine_s, rule.unknown_engine)
    yield "engine's time", engine_s, "measured divided by predicted, of the seconds that the engine adds"
    for kind, log_sd in rule.kernels.items():
        yield f"kernels, {kind}", log_sd, "the same of kernels and links"
    yield "TTFT", rule.floor, "the same of the whole, in addition"
    yield "TTFT, short", rule.short, f"the same below {SHORT_TOKENS} tokens, in addition"


def _values(engine: Engine, term: str) -> list[tuple[str, float]]:
    if term == "kernel_scale":
        return [(f"{term}, {gpu}", scale) for gpu, scale in engine.kernel_scale.items()]
    return [(term, float(getattr(engine.host, term) or 0.0))]


def _value_text(term: str, value: float) -> str:
    return format_seconds(value) if term.endswith("_s") else f"{value:.3g}"


def _range(term: str, value: float, spread: float | None) -> str:
    if spread is None or not value:
        return ""
    factor = math.exp(DEVIATES_OF_80_PERCENT * spread)
    return f"{_value_text(term, value / factor)} to {_value_text(term, value * factor)}"


def _engine_errors(engine: Engine) -> str:
    fit = engine.fit
    assert fit is not None
    short = "" if fit.short_coverage is None else f", {fit.short_coverage:.0%} below {SHORT_TOKENS} tokens"
    left_out = f"median {fit.left_out_median_ape:.1%}, mean {fit.left_out_mape:.1%}"
    inside = f"{fit.coverage:.0%} inside their 80 % intervals{short}; {fit.source}"
    if fit.left_out == "engine":
        return f"each engine left out, {SHORT_TOKENS} tokens and more: {left_out}; {inside}"
    own = f"median {fit.median_ape:.1%}, mean {fit.mape:.1%} on {fit.num_rows} prefills"
    return f"{own}; each {fit.left_out} left out: {left_out}; {inside}"
