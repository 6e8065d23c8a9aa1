"""Mutation testing of the model of time and of the bounds: which small changes of the code no test notices.

python benchmarks/mutation.py [--sample 60] [--seed 32] [--only PATH] [--again]    try mutants that have no result yet
python benchmarks/mutation.py --report                                   write results/mutation.md

A mutant is the code with one changed operator, constant, condition or call, or without one statement; assertions
(also `strict` of zip), messages and imports stay unchanged. The tests of each mutant run in a fork, in which the
mutant's definitions replace those of the module. The laws were written with the survivors of seeds 1, 2, 3,
11, 12, 21, 22, 31, 41 and 77 in view; the sample of the page (seed 32) was drawn afterwards. Laws that it led to do
not count in its figures. Results are kept in results/mutation.json. A mutant's name contains the code of the changed
statement, so that a mutant is tried again if the statement changes. data/equivalent_mutants.json lists surviving
mutants that no test can detect, with the reason: they change no time, no bound, no message and no number of operations,
for any input.
A budget, a tolerance, the size of a block and the case of two equal floats are not equivalent.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULT, EQUIVALENT = (ROOT / "benchmarks" / name for name in ("results/mutation.json", "data/equivalent_mutants.json"))
LAWS, SEARCH = "tests/laws/test_executors.py", "tests/planner/search"


def _agree(names: Iterable[str], network: str) -> list[str]:
    return [f"{LAWS}::test_every_executor_agrees_with_the_event_executor[{name}-{network}]" for name in names]


def _layers(*names: str) -> list[str]:
    return [f"{LAWS}::test_many_layers[{name}]" for name in names]


def _noise(*names: str) -> list[str]:
    return [f"tests/laws/test_noise_runs.py::test_both_executors_agree_sample_by_sample[{name}]" for name in names]


_OWN, _BATCHES, _SMALL = (
    "tests/kvrsim/executors",
    f"{LAWS}::test_a_batch_equals_its_rows",
    f"{LAWS}::test_small_programs",
)
TESTS = {  # tests that cover a module; quick tests and those that detect the most mutants come first
    "kvrsim/executors/batch.py": [
        *(_SMALL, f"{_OWN}/test_executors.py", f"{_OWN}/test_run.py"),
        *_agree(("ring", "tsp"), "own links"),
        *_noise("ring", "kvr-direct"),
    ],
    "kvrsim/executors/bus.py": [
        *(_SMALL, f"{_OWN}/test_run.py", f"{_OWN}/test_bus.py"),
        *_agree(("tsp", "pp"), "bus"),
        *_layers("tsp-bus"),
        *_noise("ring"),
    ],
    "kvrsim/executors/chain.py": [
        *(f"{_OWN}/test_chain.py", f"{_OWN}/test_run.py"),
        *_agree(("kvr-s", "kvr-b"), "own links"),
        *_layers("kvr-s-switch"),
        f"{_BATCHES}[kvr-s]",
    ],
    "kvrsim/executors/event.py": [
        *(_SMALL, f"{_OWN}/test_bus.py", "tests/kvrsim/results/test_timeline.py"),
        *_agree(("tsp",), "own links"),
        *_noise("tsp"),
    ],
    "kvrsim/executors/pipeline.py": [
        *(f"{_OWN}/test_pipeline.py", f"{_OWN}/test_run.py"),
        *_agree(("pp", "pp2+cp2", "tp2+pp"), "own links"),
        *_agree(("pp",), "bus"),
        *_layers("pp2+cp2-switch"),
    ],
    "kvrsim/executors/run.py": [
        *(f"{_OWN}/test_run.py", _SMALL, f"{_OWN}/test_pipeline.py"),
        *(test for network in ("own links", "bus") for test in _agree(("kvr-s", "pp"), network)),
        *_noise("tsp"),
    ],
    "kvrsim/executors/steady.py": [f"{_OWN}/test_steady.py", f"{_OWN}/test_run.py", _SMALL, *_layers("tsp-switch")],
    "planner/search/bound.py": [
        f"{SEARCH}/test_bound.py::{name}"
        for name in (
            "test_the_bound_is_close",
            "test_partitions_between_walls_have_all_tokens",
            "test_one_gpu",
            "test_what_refuted_an_earlier_bound",
            "test_slow_links_few_ranks",
            "test_anything",
            "test_what_own_measurements_tell",
        )
    ],
}
Change = Callable[[], object]
LIMIT_S = 100  # maximum CPU seconds of one mutant, which is killed after them; unchanged modules take less than half
_OPERATORS = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
}
_NAMES = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "any": "all", "all": "any"}


def mutants(path: str) -> Iterator[tuple[str, int]]:
    """Yield names and numbers of all mutants of a module."""
    names = Counter[str]()
    for number, (statement, what, _) in enumerate(_sites(ast.parse((ROOT / path).read_text()))):
        name = f"{path}: {' '.join(ast.unparse(statement).split())[:150]}: {what}"
        names[name] += 1
        yield f"{name} ({names[name]})" if names[name] > 1 else name, number


def mutant(path: str, number: int) -> ast.Module:
    """The syntax tree of one mutant."""
    tree = ast.parse((ROOT / path).read_text())
    _, _, change = next(islice(_sites(tree), number, None))
    change()
    return ast.fix_missing_locations(tree)


def _sites(tree: ast.Module) -> Iterator[tuple[ast.stmt, str, Change]]:
    """Yield, for each change, the statement, the name, and the function that makes the change."""
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt) or isinstance(statement, ast.Assert | ast.Raise | ast.Import):
            continue
        if isinstance(statement, ast.AugAssign) or (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        ):
            yield statement, "left out", lambda one=statement: _leave_out(tree, one)
        for node in _own_expressions(statement):
            yield from ((statement, what, change) for what, change in _changes(node))


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without those of inner statements and annotations."""
    for name, value in ast.iter_fields(statement):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr) and name not in ("annotation", "returns", "decorator_list", "bases"):
                checks = [one.value for one in ast.walk(child) if isinstance(one, ast.keyword) and one.arg == "strict"]
                yield from (node for node in ast.walk(child) if node not in checks)
    if isinstance(statement, ast.AugAssign):
        yield statement


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in _OPERATORS:
            new = _OPERATORS[type(op)]
            yield f"{type(op).__name__} -> {new.__name__}", lambda: setattr(node, "op", new())
        case ast.Compare(ops=[op, *_]) if type(op) in _OPERATORS:
            new = _OPERATORS[type(op)]
            yield f"{type(op).__name__} -> {new.__name__}", lambda: node.ops.__setitem__(0, new())
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", lambda: setattr(node, "value", not value)
        case ast.Constant(value=int(value)):
            yield f"{value} -> {value + 1}", lambda: setattr(node, "value", value + 1)
        case ast.Attribute(attr=name) if name in _NAMES:
            yield f"{name} -> {_NAMES[name]}", lambda: setattr(node, "attr", _NAMES[name])
        case ast.Call(func=ast.Name(id=name) as called) if name in _NAMES:
            yield f"{name} -> {_NAMES[name]}", lambda: setattr(called, "id", _NAMES[name])
        case ast.UnaryOp(op=ast.Not() | ast.USub() as op):
            yield f"without {type(op).__name__}", lambda: setattr(node, "op", ast.UAdd())


def _leave_out(tree: ast.Module, statement: ast.stmt) -> None:
    for parent in ast.walk(tree):
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and statement in value:
                value[value.index(statement)] = ast.Pass()


def is_killed(path: str, tree: ast.Module) -> bool:
    """Whether a test fails on the mutant, or does not end."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            _replace(path, tree)
            options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "mutation"]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that are imported already
            os._exit(pytest.main([*options, *TESTS[path]]))
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] != 0


def _replace(path: str, tree: ast.Module) -> None:
    """Run the mutated module, and replace the original's definitions in all modules that have imported them."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    mutated = {"__name__": module.__name__, "__file__": module.__file__, "__package__": module.__package__}
    exec(compile(tree, path, "exec"), mutated)
    own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    for other in [one for name, one in sys.modules.items() if name.startswith(("kvrsim", "planner"))]:
        for name, value in own.items():
            if vars(other).get(name) is value:
                setattr(other, name, mutated[name])


def report(results: dict[str, bool], names: set[str]) -> None:
    """Write the page: killed mutants per module, and all survivors. names: all mutants of the code as it is now."""
    from validate.report import write_benchmark  # imported here because a mutant needs no reports

    reasons = json.loads(EQUIVALENT.read_text())
    lines = [*(__doc__ or "").partition("unchanged. ")[2].strip().splitlines(), ""]
    changed = sum(name not in names for name in results)
    lines += [f"{len(results)} mutants were tried. The statements of {changed} of them have changed since.", ""]
    lines += ["| module | mutants | killed | equivalent | killed of the others |", "|---|---|---|---|---|"]
    for path in (*TESTS, ""):
        own = {name: killed for name, killed in results.items() if name.startswith(path)}
        killed, equal = sum(own.values()), sum(name in reasons for name, killed in own.items() if not killed)
        share = killed / max(1, len(own) - equal)
        lines.append(f"| {path or '**all**'} | {len(own)} | {killed} | {equal} | {share:.1%} |")
    survivors = [name for name, killed in results.items() if not killed]
    lines += ["", "Survivors:", "", *(f"- `{name}`. {reasons.get(name, '')}".rstrip() for name in survivors)]
    write_benchmark("mutation", lines)


def _drawn(every: Sequence[tuple[str, str, int]], seed: int, size: int) -> list[tuple[str, str, int]]:
    """A sample: the first mutants in the order of a hash of the name. It changes little when the code changes."""
    return sorted(every, key=lambda one: sha256(f"{seed} {one[1]}".encode()).digest())[:size]


def main() -> None:
    """Try a sample of mutants, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=32)
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true", help="also try survivors that are not equivalent")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    os.chdir(ROOT)
    for name in ("kvrsim.model.reader", *(path.removesuffix(".py").replace("/", ".") for path in TESTS)):
        importlib.import_module(name)  # before the forks; the reader of models imports torch and transformers
    every = [(path, *one) for path in TESTS for one in mutants(path)]
    if args.report:
        return report(results, {name for _, name, _ in every})
    passes, reasons = set(), json.loads(EQUIVALENT.read_text())
    again = {name for name, killed in results.items() if args.again and not killed and name not in reasons}
    for path, name, number in _drawn(every, args.seed, args.sample):
        if (name not in results or name in again) and path.startswith(args.only):
            if path not in passes and is_killed(path, ast.parse((ROOT / path).read_text())):
                raise SystemExit(f"the tests of {path} fail without a mutant")
            passes.add(path)
            results[name] = is_killed(path, mutant(path, number))
            RESULT.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
            print("killed  " if results[name] else "SURVIVED", name, flush=True)


if __name__ == "__main__":
    main()
