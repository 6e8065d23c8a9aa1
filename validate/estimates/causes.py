"""Why both sides differ, as was found in the rows that the package reads and in the calls that kvrsim makes.

By row of the comparison: a key of OPERATIONS, or WHOLE.
"""

from __future__ import annotations

from collections.abc import Mapping

WHOLE = "whole"  # routed experts that lie whole on the GPUs

COMMON: Mapping[str, str] = {
    "norms": (
        "kvrsim counts a norm and a residual addition as two kernels, which move 4 and 6 bytes an element. The package"
        " counts one that moves 8, as engines have that fuse the two. kvrsim also counts the norms inside of attention:"
        " of latents, of queries and keys, of the scan's output. For Qwen3.5 the package counts one more sum of each"
        " layer's experts and shared expert, so that the two come out alike."
    ),
    "steps": (
        "kvrsim counts the rotary embedding by its bytes, gates and activations; of latent attention also the copy of"
        " the one rotated key to the keys of all heads. The package has the activation and the gate of a shared expert."
    ),
    "ends": (
        "kvrsim reads and writes the embedding and computes the head for the last token. The package only writes the"
        " embedding. For GPT-OSS and Qwen3-235B it leaves the head out of a prefill."
    ),
    "clock": (
        "kvrsim's products, attention and experts slow down as the clock falls under load. NVIDIA's rows are added up"
        " as they are. Short calls were timed near the burst clock; calls of several milliseconds, again and again,"
        " below it."
    ),
}

_LONG_EXPERTS = (
    "The package's tables end at 16384 tokens. For twice as many it takes {factor} times as long, by the ratio of its"
    " bounds from FLOPs and bytes; kvrsim {ours} times. From 8192 to 16384 tokens the rows grow {last} times."
)
_BUSIEST = (
    "SGLang's rows of several GPUs cannot be used: its collector gives all that belongs to other GPUs to expert 0. So"
    " kvrsim stands beside TensorRT-LLM's rows, which are of the busiest GPU under a power law."
)
_EXPONENT = " The package takes rows of exponent 1.2, where the busiest GPU has more than under kvrsim's imbalance."
_CALLS = (
    "To each call the package adds {added} us for rotary embedding and cache{norms}, whatever the tokens; kvrsim counts"
    " their bytes in other rows."
)
_LONG_CALLS = (
    " On B200 the table ends at 16384 tokens with rows that grow 2.9 times from 8192 on. The package takes 4.0 times as"
    " long for twice as many, kvrsim's tiles 3.4 times."
)
_NARROW = (
    "On one of eight GPUs these matrices have only {features} features. The profile's form was fitted to matrices of at"
    " least 1024; the package looks up its row."
)
_FP8 = "The profile's form, which is off by 10 to 12 % on average for products in FP8 with scales by block."

CAUSES: Mapping[str, Mapping[str, str]] = {
    "deepseek-v3": {
        "projections": _FP8,
        "output": _FP8,
        "attention": (
            "Calls of 32768 tokens, 4 to 9 ms each, were timed one after the other with the clock already down;"
            " kvrsim's figure is that of the burst clock."
        ),
        "router": f"{_NARROW.format(features='256')} It counts it in all 61 layers, kvrsim in the 58 that have one.",
        "shared": (
            f"{_NARROW.format(features='256 or 512')} TensorRT-LLM's rows, which profile h200-flash has, and SGLang's"
            " on B200 are slower there than the form; SGLang's on H100 are not."
        ),
        "dense": "The first three of 61 layers have a dense MLP. The package counts experts and a shared expert there.",
        "experts": (
            f"{_LONG_EXPERTS.format(factor='1.58', ours='1.9 to 2.0', last='1.9')} On B200 the profile's form is 17 to"
            " 20 % above the rows from 4096 tokens on. The package counts experts in all 61 layers, kvrsim in 58."
        ),
        WHOLE: (
            f"{_BUSIEST} For this type the profiles have SGLang's kernels. Those of TensorRT-LLM are other programs:"
            " sliced experts take 2.4 times as long with them on Hopper and 1.3 times on B200."
        ),
    },
    "gpt-oss-120b": {
        "attention": (
            f"{_CALLS.format(added='13', norms='')} The form of heads of 64 is 16 % short for 4096 tokens on Hopper."
            f"{_LONG_CALLS}"
        ),
        "window": f"{_CALLS.format(added='13', norms='')} On B200 the form is 23 % short for 4096 tokens.",
        "output": _NARROW.format(features="512"),
        "router": _NARROW.format(features="128"),
        "experts": (
            "On Hopper the rows of a quarter or an eighth of an expert take little more than half as long as those of"
            " GPT-OSS 20B with the same work (an eighth, 16384 tokens, H100: 1.2 and 2.1 ms a layer), as if Triton's"
            " kernel had been tuned for these slices. The profile's form was fitted to both."
        ),
        WHOLE: (
            f"{_BUSIEST}{_EXPONENT} The profiles have SGLang's kernel, which takes less time: on B200 13 ms for sliced"
            " experts and 4096 tokens, where TensorRT-LLM's takes 29 ms for whole ones, the same work."
        ),
    },
    "qwen3-235b-a22b": {
        "attention": _CALLS.format(added="40", norms=", and for norms of queries and keys") + _LONG_CALLS,
        "router": _NARROW.format(features="128"),
        "experts": _LONG_EXPERTS.format(factor="1.8 (on H200 2.0)", ours="1.9 to 2.0", last="1.8 to 1.9"),
        WHOLE: _BUSIEST + _EXPONENT,
    },
    "qwen3.5-397b-a17b": {
        "attention": (
            "On B200 the package takes Triton's kernel for heads of 256, which it holds to be SGLang's choice for this"
            " model. The profile has TensorRT-LLM's, whose rows in the same table are 5 to 6 times as fast. On Hopper"
            f" both have FlashAttention-3. {_CALLS.format(added='40', norms=', and for norms of queries and keys')}"
        ),
        "scan": "The profile's form of the gated delta rule, which is off by 8 % on average on H100.",
        "router": _NARROW.format(features="512"),
        "shared": (
            f"{_NARROW.format(features='128 or 256')} TensorRT-LLM's rows, which profile h200-flash has, are slower"
            " there than the form."
        ),
        "experts": (
            f"{_LONG_EXPERTS.format(factor='1.64', ours='1.8 to 1.9', last='1.6 to 1.7')} On B200 the profile's form is"
            " 10 to 14 % above the rows."
        ),
        WHOLE: (
            f"{_BUSIEST} On Hopper these take 2.4 ms for 1024 tokens as for 2048, three to four times as long as sliced"
            " experts with the same work, and go on growing: a kernel that was chosen badly. On B200 they agree."
        ),
    },
}
