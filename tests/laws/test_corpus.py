"""Replay the examples in corpus.json of the executors' law: five fixed ones, and all that failed in a campaign.

python -m tests.laws.test_corpus SEED MINUTES    runs new examples; records the campaign and failed examples

An example is a strategy, a network and the seed of a random.Random, which the builders draw the scenario from. If a
builder changes, so does the scenario of a seed: keep a scenario that must not be lost as files, as in
tests/planner/search/cases.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest

from kvrsim.strategies import get_strategy
from tests.building import any_rows, any_run
from tests.laws.test_executors import NAMES, NETWORKS, assert_executors_agree, assert_executors_agree_on_a_small_program

CORPUS = Path(__file__).with_name("corpus.json")
SMALL = "small programs"  # examples of this name are programs, with a network of their own


def replay(name: str, network: str, seed: int) -> None:
    """Run one example; raises AssertionError if the executors differ."""
    if name == SMALL:
        return assert_executors_agree_on_a_small_program(seed)
    rng, strategy = random.Random(seed), get_strategy(name)
    scenario = any_run(rng, strategy, topologies=NETWORKS[network])
    return assert_executors_agree(scenario, strategy, any_rows(rng, scenario, strategy, 3))


@pytest.mark.parametrize(("name", "network", "seed"), json.loads(CORPUS.read_text("utf-8"))["examples"])
def test_examples_of_campaigns(name: str, network: str, seed: int) -> None:
    replay(name, network, seed)


def campaign(seed: int, minutes: float) -> int:
    """Run random examples for some minutes; return the number of failures."""
    rng, until_s, count, failing = random.Random(seed), time.monotonic() + 60.0 * minutes, 0, []
    while time.monotonic() < until_s:
        one = rng.choice((*NAMES, SMALL)), rng.choice(sorted(NETWORKS)), rng.randrange(2**32)
        count += 1
        try:
            replay(*one)
        except Exception as error:  # every error is a finding
            print(*one, repr(error)[:300], flush=True)
            failing.append(one)
    corpus = json.loads(CORPUS.read_text("utf-8"))
    corpus["campaigns"].append(
        {"seed": seed, "date": time.strftime("%Y-%m-%d"), "tried": count, "failed": len(failing)}
    )
    corpus["examples"] += failing
    CORPUS.write_text(json.dumps(corpus, indent=1) + "\n", "utf-8")
    return len(failing)


if __name__ == "__main__":
    sys.exit(campaign(int(sys.argv[1]), float(sys.argv[2])) > 0)
