"""Resolve launches by an engine's own code, in an interpreter that has the engine; validate.engine_flags runs it.

Standard input is a JSON object with the engine and its launches: arguments, a config.json, the GPU's compute
capability, and the number of GPUs per node. Standard output is a JSON object with the resolved sizes of each launch, or
the reason why the engine refuses it. No GPU is needed: the platform's properties are given, and stand-ins replace
compiled modules that are missing.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

MISSING = (
    *("xgrammar", "opentelemetry", "llguidance", "torchvision", "tvm_ffi", "sentencepiece", "compressed_tensors"),
    "sgl_kernel",
    *("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._moe_C_stable_libtorch", "vllm._qutlass_C"),
    "vllm.vllm_flash_attn",
)
HOPPER = 9
BLACKWELL = 10


class Anything:
    """An object that has every attribute and accepts every call, for stand-in modules."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, _: object) -> Any:
        return Anything()

    def __or__(self, _: object) -> Any:
        return Anything()

    def __ror__(self, other: object) -> Any:
        return other

    def __bool__(self) -> bool:
        return False


class StandIn(types.ModuleType):
    """A stand-in for a module that is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "9.9.9"
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of stand-ins for MISSING modules; it is the last finder, so that installed modules come first."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        is_missing = any(fullname == name or fullname.startswith(f"{name}.") for name in MISSING)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_missing else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def resolve_vllm(arguments: list[str], launch: dict[str, Any]) -> dict[str, Any]:
    """Resolve with EngineArgs.create_engine_config on a simulated CUDA platform."""
    sys.modules["vllm.vllm_flash_attn"] = StandIn("vllm.vllm_flash_attn")
    stand_in_for_operators()
    import vllm.model_executor.models.registry as registry  # type: ignore[import-not-found]
    import vllm.platforms as platforms  # type: ignore[import-not-found]
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability  # type: ignore[import-not-found]

    major = launch["capability"]

    class Gpu(cuda.CudaPlatformBase):  # type: ignore[misc]
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(major, 0))
        get_device_name = classmethod(lambda cls, device_id=0: launch["gpu"])
        get_device_total_memory = classmethod(lambda cls, device_id=0: launch["memory_bytes"])
        device_count = classmethod(lambda cls: launch["gpus_per_node"])
        is_fully_connected = classmethod(lambda cls, ids: True)
        num_compute_units = classmethod(lambda cls, device_id=0: launch["num_sms"])

    platforms._current_platform = Gpu()
    import vllm.config.vllm as settings  # type: ignore[import-not-found]

    settings.HAS_TRITON = True  # the check of Triton would need a driver
    registry._run_in_subprocess = lambda function: function()
    from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
    from vllm.usage.usage_lib import UsageContext  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", launch["folder"], "--skip-tokenizer-init", *arguments[1:]])
    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)
    parallel = config.parallel_config
    stage = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size * parallel.data_parallel_size
    return {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "context": parallel.prefill_context_parallel_size,
        "data": parallel.data_parallel_size,
        "expert_parallel": stage if parallel.enable_expert_parallel else 1,
        "expert_data": 1,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
    }


def stand_in_for_operators() -> None:
    """Let torch accept operators that missing compiled modules would register."""
    import torch
    from torch import library

    getattr_of = torch._ops._OpNamespace.__getattr__

    def operator(namespace: Any, name: str) -> Any:
        try:
            return getattr_of(namespace, name)
        except AttributeError:
            return Anything()

    if getattr_of.__name__ != operator.__name__:
        torch._ops._OpNamespace.__getattr__ = operator
        library.register_fake = lambda *_, **__: lambda function: function


def pretend_cuda(launch: dict[str, Any]) -> None:
    """Make torch report a GPU with the properties of the launch."""
    import torch

    properties = types.SimpleNamespace(
        name=launch["gpu"],
        major=launch["capability"],
        minor=0,
        total_memory=launch["memory_bytes"],
        multi_processor_count=launch["num_sms"],
    )
    torch.version.cuda = "12.9"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: launch["gpus_per_node"]
    torch.cuda.get_device_capability = lambda device=None: (launch["capability"], 0)
    torch.cuda.get_device_name = lambda device=None: launch["gpu"]
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.mem_get_info = lambda device=None: (launch["memory_bytes"], launch["memory_bytes"])


def resolve_sglang(arguments: list[str], launch: dict[str, Any]) -> dict[str, Any]:
    """Resolve with ServerArgs.resolve_once on a simulated CUDA platform."""
    pretend_cuda(launch)
    from sglang.srt import runtime_context  # type: ignore[import-not-found]
    from sglang.srt.arg_groups.overrides import resolved_view  # type: ignore[import-not-found]
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]

    hopper = launch["capability"] == HOPPER
    blackwell = launch["capability"] == BLACKWELL
    facts = {"is_cuda": True, "is_sm90": hopper, "is_hopper_with_cuda_12_3": hopper, "has_flashinfer": True}
    facts |= {"is_sm100": blackwell, "is_blackwell": blackwell, "is_sm100_or_sm110": blackwell}
    facts |= {"is_sm110": False, "is_sm120": False}
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    place = arguments.index("--model-path") + 1
    words = [*arguments[:place], launch["folder"], *arguments[place + 1 :]]
    if "--nnodes" in words:
        words += ["--dist-init-addr", "127.0.0.1:20000"]
    with runtime_context._PlatformOverride(**facts):
        args = ServerArgs.from_cli_args(parser.parse_args([*words, "--skip-tokenizer-init", "--device", "cuda"]))
        args.resolve_once()
        args.check_server_args()
        view = resolved_view(args)
        stage_data = view.attn_dp_size
        return {
            "tensor": view.tp_size // (view.attn_cp_size * stage_data),
            "pipeline": view.pp_size,
            "context": view.attn_cp_size,
            "data": stage_data * view.dp_size,
            "expert_parallel": view.ep_size,
            "expert_data": view.moe_dp_size,
            "dtype": view.dtype,
        }


def main() -> None:
    """Resolve each launch; a refusal has the last lines of the engine's error."""
    import torch._inductor.config
    import torch.utils.flop_counter  # noqa: F401  # before stand-ins

    sys.meta_path.append(StandIns())
    request = json.load(sys.stdin)
    resolve = {"vllm": resolve_vllm, "sglang": resolve_sglang}[request["engine"]]
    answers = []
    for launch in request["launches"]:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(launch["config"]), "utf-8")
            try:
                answers.append(resolve(launch["args"], launch | {"folder": folder}))
            except (SystemExit, Exception) as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                answers.append({"refused": f"{type(error).__name__}: {' '.join(lines)[:300]}"})
    sys.stdout = sys.__stdout__
    print("\n" + json.dumps({"version": importlib.metadata.version(request["engine"]), "answers": answers}))


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    main()
