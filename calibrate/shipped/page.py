"""The page about the shipped profiles: `python -m calibrate.shipped.page` rewrites docs/results/profiles.md.

calibrate.shipped.recipes does so too, when it has fitted profiles anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from calibrate.fit.report import TITLES
from kvrsim.engine import PRIOR_ENGINE
from kvrsim.io.files import write_atomically
from kvrsim.kernels.profile import CalibrationProfile, OperationFit, builtin_profiles, load_profile
from kvrsim.units import format_seconds, format_tokens

_DOCS = Path(__file__).parents[2] / "docs" / "results"
PAGE = _DOCS / "profiles.md"

_ABOUT = """\
# Profiles

A profile holds the measured rates of one machine and its software, operation by operation. It is a JSON file.
[The model of time](../explanation/model-of-time.md) explains its content. `--profile NAME` selects one of the profiles
below, `--profile PATH` one of your own. Without `--profile` the cluster decides: `a100-eager` for A100s of 80 GB (and
without a cluster), `h100-flash` for H100s, `h200-flash` for H200s, `b200-flash` for B200s, `gb200-flash` for GB200s,
`b300-flash` for B300s, `gb300-flash` for GB300s, `l40s-flash` for L40S, `rtx-pro-6000-flash` for RTX PRO 6000. For
other GPUs kvrsim uses the limits of the datasheet (`--profile roofline`), which are no prediction.

`a100-eager` describes the paper's setup. For a current serving engine choose a `-flash` profile. `a100-vidur` has
kernels of 2023/24. All except `a100-eager` are sums of kernels that were timed one by one. To these sums an
[engine](../how-to/engine.md) adds what the serving software takes; the `-flash` profiles take `serving` by default.
[Serving engines](serving.md) compares the result with whole prefills.

**Which tables.** Products of the `-flash` profiles are from SGLang's tables in NVIDIA's package, which are timed with
random data. vLLM's are not used: their weights are whatever memory held, which takes less power, and large products of
an A100 come to 95 % of its datasheet. A fit above 92 % is refused. Where more than a tenth of SGLang's products of 50
to 500 us take over 15 % longer than TensorRT-LLM's, the table has many slow cells, and TensorRT-LLM's products are
used: so on H200 (22 %) and L40S (17 %); on the other GPUs it is at most 5 %
(`python -m calibrate.shipped.slow_cells`).

**Clock.** Rates are those of short bursts. A GPU under load lowers its clock within about a tenth of a second:
`kernels.clock` has the share that remains and the time constant. Both are fitted to the products that fill the GPU. The
collectors run each product in a loop whose length is known, SGLang's up to six times longer than TensorRT-LLM's. So
rows of different length in two tables tell what the clock is after how many milliseconds. On H200 it falls to 90 % with
89 ms; a public test has 687 TFLOP/s in loops of a second where short loops have 790, which is 87 %. A100, GB300 and
RTX PRO 6000 have no clock: no fall is seen, or none that the tables tell from one over sizes.

**All-reduces** were measured: at each size the faster of NCCL's and SGLang's own. Links with less bandwidth of the same
kind (A800, H800) have the measured latencies, and rates in proportion.

In the tables, *error* is the mean absolute error on the rows of the fit, and *held out* the error on rows that the fit
did not use. `kvrsim profiles show NAME` prints everything in a profile. `python -m calibrate.shipped.page` writes this
page.
"""

_OWN = r"""## One of your own

There are two ways to make a profile. Both print the errors; `--report FILE` writes them as a page like those above, and
`--plot FILE` draws them. Matrix products and attention must be measured. Other operations may come from the datasheet
(for the host: twelve launches of 5 us per layer). The profile then says so wherever it is used, and its intervals are
wider.

**From published tables.** NVIDIA's tables are in a package on PyPI. A source is
`aiconfigurator:SYSTEM[/FRAMEWORK[/VERSION]]`; systems are `a100_sxm`, `b200_sxm`, `gb200`, `h100_sxm`, `h200_sxm`,
`l40s` and more, frameworks `vllm`, `sglang` and `trtllm`. In a checkout of kvrsim, install `'.[import]'`. The fit takes
about a minute:

```
pip install 'kvrsim[import]'
kvrsim calibrate import aiconfigurator:b200_sxm/trtllm --output b200-trtllm.json --report b200-trtllm.md
kvrsim plan --gpus 4 --ctx 16k --model llama-3-8b --cluster b200-nvlink5 --profile b200-trtllm.json
```

[vidur](https://github.com/microsoft/vidur)'s CSV files are read without conversion, several at once. `?gpu=TEXT`,
`?kernel=TEXT` or `?model=TEXT` at the end of a source keeps only the rows with this text in that column:

```
cd vidur/data/profiling
kvrsim calibrate import compute/a100/meta-llama/Llama-2-7b-hf/mlp.csv \
    compute/a100/meta-llama/Llama-2-7b-hf/attention.csv network/a100_dgx/send_recv.csv \
    --gpu a100-80gb --output a100-mine.json
```

**From your own measurements.** A CSV file has one row per operation:

```csv
operation,kernel,device,dtype,tokens,in_features,out_features,chunk,prefix,num_attention_heads,num_key_value_heads,head_dim,bytes,ranks,nodes,median_s,source
gemm,cublas,NVIDIA H100 80GB HBM3,bf16,4096,4096,12288,,,,,,,,,0.00065,our own
attention,flash_attn,NVIDIA H100 80GB HBM3,bf16,,,,2048,6144,32,8,128,,,,0.00041,our own
norm,vllm,NVIDIA H100 80GB HBM3,bf16,4096,,,,,,,,67108864,,,0.00005,our own
send_recv,nccl,NVIDIA H100 80GB HBM3,bf16,,,,,,,,,33554432,2,1,0.0001,our own
host_layer,vllm,our host,,,,,,,,,,,,,0.00008,our own
```

[File formats](../reference/formats.md#measurements) lists the operations and their columns. Measure matrix products
with at least four row counts, and attention both without and with a prefix, because KV-Runahead's chunks have a prefix.

```
kvrsim calibrate fit --compute kernels.csv --links links.csv --output mine.json --report mine.md --plot mine.png
kvrsim plan --gpus 4 --ctx 16k --cluster h100-nvlink --profile mine.json
```

## Fit the shipped profiles again

```
git clone https://github.com/microsoft/vidur
make profiles VIDUR=vidur
```

This fits all of the above but `a100-eager`, which `make fit` fits to the published prefills. The sources are listed in
`calibrate/shipped/recipes.json`: tables of the package aiconfigurator-core 0.12.0, which `make` installs, and files of
vidur by commit and path, which are read from the history of the clone.

The profiles that ship were fitted to medians of vidur's rows, a subset of what the recipes read now. Refitted, TTFTs of
Llama 3 8B (1, 4 and 8 GPUs, 2k to 32k tokens) change by at most 0.01 % with the `-flash` profiles, and with
`a100-vidur` by at most 0.3 %, in one case 1.0 %. FlashInfer's calls, with which `a100-flash` is compared, are in a file
that some clones hold only as a Git LFS pointer. Without it the comparison is omitted; the profile is the same.
"""


def page(profiles: Sequence[CalibrationProfile]) -> str:
    """docs/results/profiles.md."""
    return "\n".join([_ABOUT, *(_section(profile) for profile in profiles), _OWN])


def write_page() -> None:
    """Rewrite the page from the profiles as they are."""
    write_atomically(PAGE, page([load_profile(name) for name in builtin_profiles()]).encode(), argument="page")


def _section(profile: CalibrationProfile) -> str:
    """One profile: what it is for, where it holds, how well."""
    facts = [
        f"- **Not covered**: {profile.not_covered}",
        f"- **Range**: {_range(profile)}",
        f"- **Host clock**: {_host(profile)}",
        *([f"- **Whole prefills**: {_prefills(profile)}"] if profile.residual else []),
        f"- **More**: {', '.join(_links(profile))}",
    ]
    rows = [_row(kind, fit) for kind, fit in profile.operations.items() if fit.num_rows]
    lines = [
        f"## {profile.name}",
        "",
        f"{profile.description[0].upper()}{profile.description[1:]}",
        "",
        *facts,
        "",
        "| operation | rows | error | held out |",
        "|---|---:|---:|---:|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def _row(kind: str, fit: OperationFit) -> str:
    return f"| {TITLES[kind]} | {fit.num_rows} | {fit.mape:.1%} | {fit.cross_validated_mape:.1%} |"


def _range(profile: CalibrationProfile) -> str:
    valid = profile.valid
    spans = (
        ("contexts of", tuple(map(format_tokens, valid.context_len)), " tokens"),
        ("", tuple(map(str, valid.num_gpus)), " GPUs"),
        ("hidden size", tuple(map(str, valid.hidden_size)), ""),
        ("head_dim", tuple(map(str, valid.head_dim)), ""),
    )
    texts = (f"{label} {_span(*ends)}{unit}".strip() for label, ends, unit in spans)
    return f"GPU {profile.gpu}, {', '.join(texts)}, {' and '.join(profile.valid.dtypes)}"


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _host(profile: CalibrationProfile) -> str:
    """How long, and how it is known; or which engine stands instead."""
    if profile.engine == PRIOR_ENGINE:
        return f"engine `{profile.engine}`"
    host, known = profile.host, profile.operations.get("host")
    parts = [f"{format_seconds(host.layer_s)} a layer"]
    if host.kernel_s:
        parts.append(f"{format_seconds(host.kernel_s)} a kernel of it")
    if host.gather_piece_s:
        parts.append(f"{format_seconds(host.gather_piece_s)} a gathering rank")
    if host.message_s:
        parts.append(f"{format_seconds(host.message_s)} a message")
    if host.resume_s:
        parts.append(f"{format_seconds(host.resume_s)} to resume after communication")
    return f"{', '.join(parts)}; {known.source if known else 'fitted to whole prefills'}"


def _prefills(profile: CalibrationProfile) -> str:
    """Errors on TTFTs, and what the table of operations is then."""
    residual = profile.residual
    assert residual is not None
    return (
        f"mean error {residual.mape:.1%} on the {residual.num_rows} published TTFTs of the fit,"
        f" {residual.cross_validated_mape:.1%} with one model left out at a time; the operations below were measured"
        f" apart from them ({profile.provenance['measured']})"
    )


def _links(profile: CalibrationProfile) -> Iterator[str]:
    """Pages about it."""
    if profile.residual is not None:
        yield "[every published TTFT beside its prediction](accuracy.md)"
    else:
        yield f"[each operation, with a picture](profiles/{profile.name}.md)"
        yield "[whole prefills beside the sum of their kernels](kernel_sums.md)"


if __name__ == "__main__":
    write_page()
