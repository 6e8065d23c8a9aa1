"""Notes on an answer: one table of codes for programs and texts for people."""

from __future__ import annotations

from collections.abc import Iterable

_RANGE = "extrapolated: {what} {value} is outside {low} to {high}, which profile {profile} was measured on"

NOTES = {
    # a scenario
    "size": "{cluster} has {has}; {gpus} are simulated on {longer}",
    "shape": "{model} has the shape of {shape}",
    "default profile": "profile {profile} by default; --profile {other} has {what}",
    "default cluster": "cluster {cluster} by default: name yours with --cluster, such as 8xh100",
    "paper": (
        "the question of the KV-Runahead paper: {model} with eager attention of 2023 on A100; name your --model and"
        " --cluster, such as llama-3.1-8b and 8xh100"
    ),
    "sibling": (
        "no kernel was measured on {gpu}: those of {measured} in proportion to the datasheets (arithmetic"
        " {compute:.2f} times, memory bandwidth {memory:.2f} times)"
    ),
    "network": "nodes of {cluster} are joined by {network}, a common choice: a cluster file has another",
    "links, messages": "links: nominal figures of {link} for single messages; collectives as measured",
    "links, given": "links as given, not as measured: their bandwidth is taken to be reached in full",
    "links, nominal": "links: nominal figures of {link}; {profile} measured {measured}",
    "roofline": "roofline: the datasheet's limits, not a measurement; expect real TTFTs 1.3 to 3 times longer",
    "max position": ("{tokens} tokens exceed the max_position_embeddings of {model} ({trained}); simulated anyway"),
    "model": "{model}: {approximation}",
    **{f"{what}-range": _RANGE for what in ("context", "GPUs", "hidden_size", "head_dim")},
    "GPU": "profile {profile} was measured on {measured}, not on {gpu}",
    "batch": "batch above 1 was not measured",
    "engine": (
        "engine {engine} was measured on {known}; its kernels on {gpu} are taken as {scale:.2f} times the profile's"
    ),
    "engine, model": "engine {engine}: no whole prefill of a {what} was measured; the interval is that of other models",
    "engine, gpu": "engine {engine}: no whole prefill on {what} was measured; the interval is that of other GPUs",
    "engine, version": "engine {engine}: this version was not measured; the nearest one stands for it",
    "engine, short": "engine {engine}: few prefills of less than {what} tokens were measured",
    # a plan
    "prefix access": "cached prefix: {ways}",
    "prefix access, chosen": "cached prefix, the faster way of each by even chunks: {ways}",
    "not compared": "not compared: {names}: takes {accepted}",
    "cannot fit": "{names} cannot fit: {nearest} needs at least {least} on a GPU; the limit is {limit}",
    "bus search": (
        "{strategy}: its search on a bus ended at {limit} partitions, the most for its GPUs and layers; a better"
        " one may exist"
    ),
    "approximate": "{strategy} is approximate: {reason}",
    "approximate, faster": "{strategy}, {ttft_s:.3g} s, is faster than {best} but is approximate: {reason}",
    "even chunks": "even chunks are as fast as KVR-S's",
    "even chunks, tied": (
        "even chunks are {gain:.1%} slower than KVR-S's: less than a prediction can tell, so take either"
    ),
    "memory": "{strategy} does not fit: rank {ranks} over {limit} (worst {worst})",
    "timelines": "no timeline of {strategies}: all timelines together have at most {most:,} operations",
    # tables and maps
    "table setting": "{strategy}: the table was made for another setting: {differences}",
    "map, tokens": "not on the map: {tokens} tokens on {num_gpus} GPUs, which would leave some without a token",
    "map, refused": "{strategy} is not on the map for {num_gpus} GPUs: it takes {accepted}",
    "map, approximate": "{strategy} is approximate, so it is never the best: {reason}",
}


class Note(str):
    """A line of text next to an answer, with a code for programs; JSON contains the text."""

    __slots__ = ("code",)
    code: str

    def __new__(cls, text: str, code: str) -> Note:
        note = super().__new__(cls, text)
        note.code = code
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[str, str]]:
        return Note, (str(self), self.code)


def with_code(notes: Iterable[str], *codes: str) -> list[str]:
    """The notes of these codes."""
    return [note for note in notes if isinstance(note, Note) and note.code in codes]


def without(notes: Iterable[str], *codes: str) -> list[str]:
    """The notes without those of these codes."""
    return [note for note in notes if not (isinstance(note, Note) and note.code in codes)]


def note(code: str, **values: object) -> Note:
    """The note of a code, with the values that its text names."""
    return Note(NOTES[code].format(**values), code)
