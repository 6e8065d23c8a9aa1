"""Notes on an answer: a code by which programs know a note, and its text, in one table."""

from __future__ import annotations

from kvrsim.text import Note

NOTES = {
    "prefix access": "cached prefix: {ways}",
    "prefix access, chosen": "cached prefix, the faster way of each by even chunks: {ways}",
    "not compared": "not compared: {names}: takes {accepted}",
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
    "fewer GPUs": "{fewer} {how} {num_gpus} with KVR-S: {fewer_s:.3g} s against {ttft_s:.3g} s",
    "memory": "{strategy} does not fit: rank {ranks} over {limit} (worst {worst})",
    "timelines": "no timeline of {strategies}: all timelines together have at most {most:,} operations",
    "table setting": "{strategy}: the table was made for another setting: {differences}",
}


def note(code: str, **values: object) -> Note:
    """The note of a code, with the values that its text names."""
    return Note(NOTES[code].format(**values), code)
