"""The page lists what an engine's parser refuses. A small parser takes the place of the engine's."""

from __future__ import annotations

import sys

import pytest

from kvrsim.errors import InputError
from planner.deploy import deploy_engine
from validate import engine_flags
from validate.engine_flags import option_arguments, page, parse_all

SMALL = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?")
for flag in {flags}:
    parser.add_argument(flag)
"""


def test_what_a_parser_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = deploy_engine("vllm")
    flags = [flag for flag in vllm.options if flag not in ("--dtype", "--enable-chunked-prefill", "--nnodes")]
    flags.remove("--enable-expert-parallel")
    monkeypatch.setitem(engine_flags.PARSERS, "vllm", ("numpy", SMALL.format(flags=flags)))
    monkeypatch.setattr(engine_flags, "launches", lambda _: [])
    result = parse_all(vllm, sys.executable)
    assert result.options == len(list(option_arguments(vllm)))
    refused = {text.split()[0] for text in result.refused_options}
    assert refused == {"--dtype", "--enable-chunked-prefill", "--nnodes", "--enable-expert-parallel"}
    assert "vllm refuses `--nnodes 2`" in "\n".join(page([result]))


def test_an_interpreter_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine_flags.PARSERS, "vllm", ("numpy", "import no_such_engine"))
    monkeypatch.setattr(engine_flags, "launches", lambda _: [])
    with pytest.raises(InputError, match=r"an interpreter with numpy installed \(ModuleNotFoundError"):
        parse_all(deploy_engine("vllm"), sys.executable)
