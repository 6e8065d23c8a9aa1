"""The question as a form: its fields, the values that a browser suggests, and the arguments of a plan from them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrsim.arguments import Option, PlanArgs, ScenarioArgs, options_of
from kvrsim.choices import ATTENTIONS, DEPLOY_ENGINES, DTYPES, PREFIX_PLACEMENTS, TOPOLOGIES
from kvrsim.errors import ABSENT, InputError
from kvrsim.io.schema import shipped_files
from kvrsim.views.page import Html, tag

_DATA = Path(__file__).parents[2] / "data"
ONLY = "only_deployable"  # the option of `kvrsim plan` that has no argument in Python
_ONLY_HELP = "Compare only the strategies that this engine has."
_FLAGS = {"yes": True, "no": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of the form."""

    name: str  # parameter of kvrsim.plan
    label: str
    example: str  # placeholder; it is a value that the field accepts
    values: tuple[str, ...] = ()  # suggestions; another value may be typed
    names: str = ""  # folder or file of kvrsim/data with the suggestions
    is_rare: bool = False  # whether the field is in the folded part of the form

    @property
    def suggestions(self) -> tuple[str, ...]:
        """Values that a browser lists; another value may be typed."""
        return self.values or (shipped_names(self.names) if self.names else ())


FIELDS = (
    Field(name="model", label="Model", example="llama-3.1-8b", names="models"),
    Field(name="cluster", label="Cluster", example="8xh100", names="clusters"),
    Field(name="ctx", label="Context", example="16k", values=("4k", "16k", "32k", "128k")),
    Field(name="gpus", label="GPUs", example="8", values=("1", "2", "4", "8", "16")),
    Field(name="cached_prefix", label="Cached prefix", example="0"),
    Field(name="batch", label="Batch", example="1"),
    Field(name="engine", label="Engine", example="vllm", names="engines"),
    Field(name=ONLY, label="Only what this engine has", example="vllm", values=DEPLOY_ENGINES),
    Field(name="strategies", label="Strategies", example="tp,kvr-s", names="strategies"),
    Field(name="rate", label="Prompts per second", example="0.5"),
    Field(name="slo", label="Target TTFT", example="2s", values=("200ms", "500ms", "1s", "2s")),
    Field(name="dtype", label="Data type", example="bf16", values=DTYPES),
    Field(name="profile", label="Profile", example="h100-flash", names="profiles", is_rare=True),
    Field(name="attention", label="Attention", example="flash", values=ATTENTIONS, is_rare=True),
    Field(
        name="prefix_placement",
        label="Place of the prefix",
        example="host:20GB/s",
        values=PREFIX_PLACEMENTS,
        is_rare=True,
    ),
    Field(name="memory_fraction", label="Memory fraction", example="0.9", is_rare=True),
    Field(name="expert_parallel", label="Expert parallelism", example="no", values=tuple(_FLAGS), is_rare=True),
    Field(name="link_bandwidth", label="Link bandwidth", example="10GB/s", is_rare=True),
    Field(name="link_latency", label="Link latency", example="5us", is_rare=True),
    Field(name="topology", label="Topology", example="switch", values=TOPOLOGIES, is_rare=True),
    Field(name="search_budget", label="Search budget", example="1.5s", is_rare=True),
)
BY_NAME = {field.name: field for field in FIELDS}
EXAMPLE = {"model": "llama-3.1-70b", "cluster": "h100-nvlink", "ctx": "32k"}  # the question of an empty form


def shipped_names(folder: str) -> tuple[str, ...]:
    """Names of a catalogue of kvrsim/data."""
    if folder == "strategies":
        from kvrsim.strategies import STRATEGIES

        return tuple(STRATEGIES)
    return tuple(shipped_files(_DATA / folder))


def options_of_plan() -> dict[str, Option]:
    """The declarations of the parameters that a field may have, by name."""
    return {**options_of(ScenarioArgs), **options_of(PlanArgs)}


def checked(question: Mapping[str, str]) -> dict[str, str]:
    """Return a question that the form can ask; raises InputError naming a field that it has not got."""
    for name, value in question.items():
        if name not in BY_NAME:
            raise InputError(name, value, f"one of {', '.join(BY_NAME)}")
    if ".py" in question.get("strategies", ""):
        raise InputError("strategies", question["strategies"], "names; a file is for the command line")
    if "ctx" not in question:
        raise InputError("ctx", ABSENT, "a context length, such as 16k")
    return dict(question)


def arguments(question: Mapping[str, str]) -> tuple[ScenarioArgs, PlanArgs, str | None]:
    """The arguments of a plan, and the engine whose strategies alone are compared; InputError names a wrong field."""
    values: dict[str, Any] = dict(checked(question))
    only = values.pop(ONLY, None)
    if only is not None and only not in DEPLOY_ENGINES:
        raise InputError(ONLY, only, f"one of {', '.join(DEPLOY_ENGINES)}")
    if (flag := values.get("expert_parallel")) is not None:
        if flag not in _FLAGS:
            raise InputError("expert_parallel", flag, f"one of {', '.join(_FLAGS)}")
        values["expert_parallel"] = _FLAGS[flag]
    return ScenarioArgs.take(values), PlanArgs.take(values), only


def form(first: Mapping[str, str]) -> Html:
    """The form with its buttons; first: values of the fields of the first question."""
    usual = [_box(field, first) for field in FIELDS if not field.is_rare]
    rare = [_box(field, first) for field in FIELDS if field.is_rare]
    more = tag("details", tag("summary", "More"), tag("div", *rare, class_="fields"), id="more")
    buttons = tag(
        "div",
        tag("button", "Plan", type="submit", class_="go"),
        tag("button", "Pin", type="button", id="pin", title="Keep this question, and compare it with others"),
        tag("button", "Clear", type="button", id="clear", title="Back to the example"),
        class_="buttons",
    )
    return tag("form", tag("div", *usual, class_="fields"), more, buttons, id="ask")


def _box(field: Field, first: Mapping[str, str]) -> Html:
    suggestions = field.suggestions
    help = _ONLY_HELP if field.name == ONLY else options_of_plan()[field.name].help
    about: dict[str, Any] = {"list": f"names-{field.name}"} if suggestions else {}
    box = tag(
        "input",
        name=field.name,
        id=f"ask-{field.name}",
        placeholder=field.example,
        value=first.get(field.name),
        autocomplete="off",
        spellcheck="false",
        **about,
    )
    listed = tag("datalist", *(tag("option", value=value) for value in suggestions), id=f"names-{field.name}")
    return tag("label", field.label, box, *((listed,) if suggestions else ()), title=on_page(help))


def fields_of(change: str) -> dict[str, str]:
    """Values of fields that a change as options of the command line means; empty if a field is missing here."""
    values: dict[str, str] = {}
    name = ""
    for word in shlex.split(change):
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            values[name] = "yes"
        elif name in values and values[name] == "yes":
            values[name] = word
        else:
            return {}
    return values if set(values) <= set(BY_NAME) else {}


def on_page(words: str) -> str:
    """A text with the labels of fields in place of the options of the command line."""
    for field in FIELDS:
        words = re.sub(rf"--{field.name.replace('_', '-')}\b", field.label, words)
    return re.sub(r"--emit [\w|]+ prints the launch", "the launch is below", words)
