"""Which backend, which place, which words: what ranks decide before they work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.errors import InputError
from kvrsim.runtime.faults import RankError, meaning
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.ranks import Launch, TorchrunPlace, launch
from kvrsim.runtime.transport import choose_backend


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        ([f"GPU-{number}" for number in range(16)], "nccl"),  # two nodes of 8, of which each rank sees 8 or 1
        (["GPU-a", "GPU-b"], "nccl"),
        (["GPU-a", "GPU-a"], "gloo"),
        (["GPU-a", None], "gloo"),
        ([None, None], "gloo"),
        (["GPU-a"], "nccl"),
    ],
)
def test_nccl_where_each_rank_has_a_gpu_of_its_own(devices: list[str | None], backend: str) -> None:
    assert choose_backend(devices, None) == backend
    assert choose_backend(devices, "gloo") == "gloo"
    if backend == "nccl":
        assert choose_backend(devices, "nccl") == "nccl"
    else:
        with pytest.raises(InputError, match="accepted: gloo"):
            choose_backend(devices, "nccl")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"repeats": 3}, "repeats is 3, but 2 on rank 0"),
        ({"warmups": 0}, "warm-ups is 0, but 1 on rank 0"),
        ({"check_logits": True}, "check of the logits is on, but off on rank 0"),
        ({"generate": 4}, "tokens to generate is 4, but 0 on rank 0"),
        ({"plans": (workers.kvr(12, 11),)}, "partitions is kvr 12,11, but kvr 11,12 on rank 0"),
    ],
)
def test_ranks_that_were_told_different_things_do_not_start(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(RankError, match=named) as caught:
        launch(workers.jobs_that_differ, changed, how=Launch(num_ranks=2, timeout_s=60, deadline_s=60))
    assert {fault.kind for fault in caught.value.faults} == {"mismatch"}


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_torchruns_place() -> None:
    assert TorchrunPlace.of(TORCHRUN) == TorchrunPlace(rank=1, size=4, local=1, num_local=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"),
        ("RANK", "4"),
        ("WORLD_SIZE", "0"),
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", None),
        ("MASTER_PORT", "a"),
    ],
)
def test_what_torchrun_would_not_say_is_named(name: str, value: str | None) -> None:
    environment = {key: one for key, one in (TORCHRUN | {name: value}).items() if one is not None}
    with pytest.raises(InputError, match=name):
        TorchrunPlace.of(environment)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:42915",
            "the connection was closed",
        ),
        ("[...unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete", "no answer within 5 s"),
        ("Application timeout caused pair closure", "the connection was closed"),
        (
            "Gloo connectFullMesh failed with [...pair.cc:144] no error. Look elsewhere. GLHF! \U0001f91e",
            "the connection was closed",
        ),
        ("wait timeout after 20000ms, keys: /default_pg/0//cpu//0/1", "no answer within 20 s"),
        (
            "[enforce fail at ../gloo/device.cc:99] rv != -1. Unable to find interface for: [0.0.0.0]",
            "no network interface that can be used; is the loopback interface up?",
        ),
        ("[a.cc:1] something new: \U0001f91e\n at frame 1", "something new: at frame 1"),
        ("", "RuntimeError"),
    ],
)
def test_messages_are_in_plain_words(said: str, meant: str) -> None:
    assert meaning(RuntimeError(said)) == meant


def test_the_digest_is_of_every_weight() -> None:
    model = workers.model_of("llama-gqa")
    same, digests = workers.model_of("llama-gqa"), set()
    digests.add(ModelForward(model).digest())
    assert ModelForward(same).digest() in digests
    for parameter in same.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 0.5
        digests.add(ModelForward(same).digest())
    assert len(digests) == 1 + len(list(same.parameters()))
