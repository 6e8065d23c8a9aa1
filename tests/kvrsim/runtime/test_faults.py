"""Faults: the most likely cause comes first, in simple words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrsim.runtime.faults import Fault, RankError, meaning


def test_the_likeliest_cause_comes_first() -> None:
    lost = Fault(rank=0, kind="link", message="connection closed", layer=3)
    dead = Fault(rank=2, kind="died", message="killed by SIGKILL", layer=2)
    error = RankError([lost, dead])
    assert error.faults[0] == dead
    assert str(error) == "rank 2, layer 2: killed by SIGKILL; rank 0, layer 3: connection closed"
    wrong = Fault(rank=0, kind="input", message="model: rope_type: got 'dynamic'")
    assert RankError([wrong, lost]).exit_code == 2, "only the ranks can tell, and it is the user's mistake"
    assert RankError([wrong, dead]).exit_code == error.exit_code == 1


def test_a_mistake_that_all_ranks_report_is_said_once() -> None:
    wrong = [Fault(rank=rank, kind="input", message="model: got 'x'", parameter="model") for rank in range(3)]
    assert str(RankError(wrong)) == "model: got 'x'"
    assert str(RankError([*wrong[:1], replace(wrong[1], message="dtype: got 'y'")])) == (
        "rank 0: model: got 'x'; rank 1: dtype: got 'y'"
    )


def test_of_the_silent_the_one_that_was_waited_for_comes_first() -> None:
    silent = [Fault(rank=rank, kind="silent", message="no answer") for rank in range(3)]
    lost = Fault(rank=3, kind="link", message="nothing came from rank 2", peer=2)
    assert RankError([*silent, lost]).faults[0].rank == 2


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:42915",
            "the connection was closed",
        ),
        ("[...unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete", "no answer within 5 s"),
        ("wait timeout after 20000ms, keys: /default_pg/0//cpu//0/1", "no answer within 20 s"),
        (
            "[enforce fail at ../gloo/device.cc:99] rv != -1. Unable to find interface for: [0.0.0.0]",
            "no network interface that can be used; is the loopback interface up?",
        ),
        ("[a.cc:1] something new: \U0001f91e\n at frame 1", "something new: at frame 1"),
    ],
)
def test_messages_are_in_plain_words(said: str, meant: str) -> None:
    assert meaning(RuntimeError(said)) == meant
