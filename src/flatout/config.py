"""Config: every setting in one frozen tree, resolved once with the reason of each derived value. The only reader of environment variables.

Flags are generated from these fields (cli/flags.py) and bear the names that users of vLLM know. resolve() is pure: it takes facts
about the model and the machine and returns a new Config plus what it decided and why. Called by llm.py, cli/ and server/launch.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

if TYPE_CHECKING:
    from flatout.hardware import Hardware
    from flatout.modelfile.spec import ModelSpec

DEFAULT_MODEL = "smollm2"
ROUNDED = {"int8": 8, "int4": 4}  # values of --quantization that round weights while loading -> bits


class ConfigError(ValueError):
    """A setting that cannot hold; the message names the flag and the mend."""


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A field with its help text. metadata: choices, flag (when it isn't the field's name), kind ("size" takes 32k / 4GiB)."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class ModelConfig:
    model: str = setting(DEFAULT_MODEL, "local folder, .gguf file, hub name (org/name) or smollm2", flag="model")
    tokenizer: str | None = setting(None, "folder or file to take the tokenizer from (default: the model's)")
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    download_dir: str | None = setting(None, "where downloads are kept (default: the hub's own cache)")
    load_format: str = setting(
        "auto", "auto; dummy: random weights from the config alone", choices=("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = setting("auto", "arithmetic of weights and activations", choices=("auto", "bfloat16", "float16", "float32"))
    quantization: str = setting(
        "auto",
        "none: weights in --dtype; gguf: those of a GGUF file in 4 and 8 bits; int8, int4: any model's projections rounded while loading, in "
        "groups of 32 (int4: the head in 8 bits); all but none multiply rows rounded to int8 (CPU); auto: gguf where it runs and --dtype is not given",
        choices=("auto", "none", "gguf", *ROUNDED),
    )
    max_model_len: int | None = setting(None, "longest context in tokens, prompt and output (default: the model's)", kind="size")
    chat_template: str | None = setting(None, "jinja file (or text) instead of the model's chat template")
    generation_config: str = setting("auto", "auto: the model's sampling defaults hold; none: they do not", choices=("auto", "none"))
    seed: int = setting(0, "seeds dummy weights; requests bring their own seed")


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = setting(16, "tokens per KV block")
    gpu_memory_utilization: float = setting(0.92, "share of the GPU's memory to use in all")
    kv_cache_memory_bytes: int | None = setting(None, "exact size of the KV pool (4GiB)", kind="size")
    num_gpu_blocks_override: int | None = setting(None, "exact number of KV blocks")
    kv_cache_dtype: str = setting(
        "auto",
        "type of keys and values; auto: --dtype, or bfloat16 beside packed weights (--quantization); int8: codes with a float32 scale for each "
        "token and head, about half of bfloat16 (CPU)",
        choices=("auto", "bfloat16", "float16", "float32", "int8"),
    )
    enable_prefix_caching: bool = setting(True, "share KV blocks between prompts with the same beginning")


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int | None = setting(None, "most sequences in a step (default: by device)", kind="size")
    max_num_batched_tokens: int | None = setting(None, "token budget of a step (default: by device)", kind="size")
    enable_chunked_prefill: bool = setting(True, "long prompts are computed in pieces beside other requests")
    scheduling_policy: str = setting("fcfs", "who goes first", choices=("fcfs", "priority"))
    async_scheduling: bool = setting(True, "plan a step while the one before it runs")


@dataclass(frozen=True)
class DeviceConfig:
    device: str = setting("auto", "where to run", choices=("auto", "cuda", "cpu"))
    threads: int | None = setting(
        None, "compute threads on the CPU (default, and the most: the cores that this process may use); fewer while others use them"
    )
    attention_backend: str = setting("auto", "auto: chosen by device and dtype", choices=("auto", "torch", "triton"))
    enforce_eager: bool = setting(False, "no captured steps: each op is launched by itself")
    max_cudagraph_capture_size: int | None = setting(
        None, "largest batch whose decode step is captured on a GPU (default: --max-num-seqs, at most 1024)", kind="size"
    )
    disable_cascade_attn: bool = setting(False, "on a GPU: each request reads its whole context, also what many share")
    deterministic: bool = setting(False, "on a GPU: the same tokens and logprobs whatever the batch, chunking and cache")


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the HTTP server alone (server/launch.py): no part of Config, since no engine needs them."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    served_model_name: str | None = setting(None, "name of the model for clients (default: the model as given)")
    api_key: str | None = setting(None, "what clients must send as Authorization: Bearer KEY")
    enable_log_requests: bool = setting(True, "a line of JSON for each request that ended, on standard error: times and counts, no text")
    max_body_bytes: int = setting(32 << 20, "largest request body taken", kind="size")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    @classmethod
    def make(cls, **options: Any) -> Config:
        """Config from flat names: Config.make(model="x", block_size=32). An unknown name is an error with the nearest one."""
        groups: dict[str, dict[str, Any]] = {}
        owners = cls.owners()
        for name, value in options.items():
            if name not in owners:
                near = get_close_matches(name, owners, 1)
                raise ConfigError(
                    f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(owners))}")
                )
            groups.setdefault(owners[name], {})[name] = value
        default = cls()
        return check(replace(default, **{g: replace(getattr(default, g), **values) for g, values in groups.items()}))

    @classmethod
    def owners(cls) -> dict[str, str]:
        """Flat option name -> name of the group that holds it."""
        default = cls()
        return {f.name: g.name for g in fields(cls) for f in fields(getattr(default, g.name))}

    def flat(self) -> dict[str, Any]:
        return {
            f.name: getattr(getattr(self, g.name), f.name)
            for g in fields(self)
            for f in fields(getattr(self, g.name))
            if is_dataclass(getattr(self, g.name))
        }

    def scheduling(self) -> dict[str, Any]:
        """What core/scheduler.py:Scheduler takes of a resolved config, but for the blocks: the engine's and the simulation's are alike."""
        return {
            "block_size": self.cache.block_size,
            "max_num_seqs": self.scheduler.max_num_seqs,
            "max_num_batched_tokens": self.scheduler.max_num_batched_tokens,
            "max_model_len": self.model.max_model_len,
            "policy": self.scheduler.scheduling_policy,
            "enable_prefix_caching": self.cache.enable_prefix_caching,
            "enable_chunked_prefill": self.scheduler.enable_chunked_prefill,
        }

    def but(self, **options: Any) -> Config:
        """A changed copy, by flat names."""
        return Config.make(**{**self.flat(), **options})


def check(config: Config) -> Config:
    """What can be judged without the model or the machine. Raises ConfigError naming the flag."""
    for group in fields(config):
        check_values(getattr(config, group.name))
    cache, scheduler = config.cache, config.scheduler
    positive = {
        "max_model_len": config.model.max_model_len,
        "block_size": cache.block_size,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "threads": config.device.threads,
        "max_cudagraph_capture_size": config.device.max_cudagraph_capture_size,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"{flag_of(name)}: must be a whole number of at least 1, got {value!r}")
    if cache.block_size > 1024 or cache.block_size & (cache.block_size - 1):
        raise ConfigError(f"--block-size: must be a power of two up to 1024, got {cache.block_size}")
    if not 0 < cache.gpu_memory_utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization: must be over 0 and at most 1, got {cache.gpu_memory_utilization!r}")
    if cache.num_gpu_blocks_override is not None and cache.kv_cache_memory_bytes is not None:
        raise ConfigError("--num-gpu-blocks-override and --kv-cache-memory-bytes both size the KV pool; give one of them")
    if config.device.enforce_eager and config.device.max_cudagraph_capture_size is not None:
        raise ConfigError("--enforce-eager captures nothing, so --max-cudagraph-capture-size has no use beside it; give one of them")
    template = config.model.chat_template
    if template is not None and "{" not in template and not Path(template).expanduser().is_file():
        raise ConfigError(f"--chat-template: no file {template!r}, and it isn't Jinja text either")
    return config


WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check_values(settings: Any) -> None:
    """Each field of a dataclass of settings against its annotation and its choices. Raises ConfigError naming the flag."""
    hints = get_type_hints(type(settings))
    for f in fields(settings):
        value, kinds = getattr(settings, f.name), get_args(hints[f.name]) or (hints[f.name],)
        if value is None and type(None) in kinds:
            continue
        # to Python True is a whole number, too: here it is not; and a whole number is a number
        fits = bool in kinds if isinstance(value, bool) else isinstance(value, (*kinds, int) if float in kinds else kinds)
        if not fits:
            wanted = " or ".join(WANTED[kind] for kind in kinds if kind in WANTED)
            raise ConfigError(f"{flag_of(f.name)}: must be {wanted}, got {value!r} ({type(value).__name__})")
        if isinstance(value, str) and not value.strip():
            raise ConfigError(f"{flag_of(f.name)}: must not be empty")
        allowed = f.metadata.get("choices")
        if allowed and value not in allowed:
            near = get_close_matches(str(value), allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{flag_of(f.name)}: {value!r} is not one of {', '.join(map(str, allowed))}{hint}")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Decision:
    """A value that resolve() derived, and why."""

    field: str
    value: Any
    reason: str


def resolve(
    config: Config, spec: ModelSpec, hardware: Hardware, *, kept: bool = False, native: bool = False
) -> tuple[Config, list[Decision]]:
    """Fill every None and "auto" from the model and the machine. Raises ConfigError where a setting cannot hold.

    kept: the model's file has weights that --quantization gguf keeps. native: the native CPU library is there.
    """
    decisions: list[Decision] = []
    options: dict[str, Any] = {}

    def decide(name: str, value: Any, reason: str) -> Any:
        decisions.append(Decision(name, value, reason))
        options[name] = value
        return value

    cuda = hardware.device == "cuda"
    if config.device.device == "cuda" and not cuda:
        raise ConfigError("--device: cuda was asked for but torch sees no CUDA device; use --device cpu")
    if config.device.device == "auto":
        decide("device", hardware.device, f"{hardware.name} found" if cuda else "no CUDA device found")

    dtype, quantization = config.model.dtype, config.model.quantization
    on_cpu = not cuda or config.device.device == "cpu"
    if quantization == "auto":
        if kept and native and on_cpu and dtype == "auto":
            quantization = decide(
                "quantization", "gguf", "the file's weights in 4 and 8 bits, times rows rounded to int8; --quantization none unpacks them"
            )
        else:
            quantization = options["quantization"] = "none"
    packed = quantization != "none"
    if packed:
        _check_packed(quantization, dtype, on_cpu, native)
    if dtype == "auto" and packed and (quantization == "gguf" or spec.moe is None):
        dtype = decide("dtype", "float32", "rows are rounded to int8 once, from what was not rounded before")
    elif dtype == "auto":
        dtype = decide("dtype", *_dtype(spec, hardware))
    elif dtype == "bfloat16" and not hardware.has_bfloat16:
        raise ConfigError(f"--dtype: {hardware.name} has no bfloat16; use float16 or float32")

    narrow = on_cpu and native and dtype == "float32" and not _unattended(spec)  # 16 bits beside float32 are read in place
    if config.cache.kv_cache_dtype == "auto":
        if packed and narrow:
            decide("kv_cache_dtype", "bfloat16", "half of float32, read as it lies, and its rounding is lost beside that of the rows")
        else:
            options["kv_cache_dtype"] = dtype
    elif config.cache.kv_cache_dtype == "int8":
        _check_int8_cache(spec, on_cpu)
    elif config.cache.kv_cache_dtype not in (dtype, *(("float16", "bfloat16") if narrow else ())):
        raise ConfigError(
            f"--kv-cache-dtype: {config.cache.kv_cache_dtype} beside --dtype {dtype} is not built here; leave it out"
            + ("" if dtype == "float32" else ", or use bfloat16 or float16 with --dtype float32 on a CPU")
        )

    length = config.model.max_model_len
    if length is None:
        length = decide("max_model_len", spec.max_position, "the model's own context")
    elif length > spec.max_position:
        raise ConfigError(f"--max-model-len: {length} is over the model's {spec.max_position}; use at most that")

    if config.device.threads is None:
        decide("threads", hardware.cpu_count, "cores this process may use")
    elif config.device.threads > hardware.cpu_count:
        decide(
            "threads",
            hardware.cpu_count,
            f"{config.device.threads} asked, but this process may use {hardware.cpu_count} cores; more threads only wait",
        )

    seqs = config.scheduler.max_num_seqs
    if seqs is None:
        large = cuda and hardware.memory_bytes >= 70 << 30
        seqs = decide("max_num_seqs", (1024 if large else 256) if cuda else 64, "by device: large GPU" if large else "by device")
    budget = config.scheduler.max_num_batched_tokens
    if budget is None:
        budget = (16384 if hardware.memory_bytes >= 70 << 30 else 8192) if cuda else 1024
        reason = "by device"
        if not config.scheduler.enable_chunked_prefill and budget < length:
            budget, reason = length, "whole prompts, since chunked prefill is off"
        budget = decide("max_num_batched_tokens", max(budget, seqs), reason if budget >= seqs else "one token for each of --max-num-seqs")
    elif budget < seqs:
        seqs = decide("max_num_seqs", budget, f"no more sequences than the token budget of {budget}")
    if not config.scheduler.enable_chunked_prefill and budget < length:
        raise ConfigError(
            f"--max-num-batched-tokens: {budget} cannot hold a prompt of --max-model-len {length} while chunked prefill is off; raise it or lower that"
        )
    for name, value in _device(config, spec, hardware, dtype, seqs):
        decide(name, *value)
    return config.but(**options), decisions


def _check_packed(quantization: str, dtype: str, on_cpu: bool, native: bool) -> None:
    """Raises ConfigError where packed weights cannot be had. Those of a GGUF file are unpacked where there is no library, which loses nothing."""
    if not on_cpu:
        raise ConfigError(f"--quantization: {quantization} runs on the CPU so far; leave it out, or use --device cpu")
    if quantization in ROUNDED and not native:
        raise ConfigError(
            f"--quantization: {quantization} needs the native library, which is not there; leave it out, or install a C++17 compiler "
            "(apt install g++, xcode-select --install), then flatout again"
        )
    if dtype == "float16":
        raise ConfigError(f"--quantization: {quantization} multiplies rows of bfloat16 or float32; use --dtype bfloat16")


def _check_int8_cache(spec: ModelSpec, on_cpu: bool) -> None:
    """Raises ConfigError where keys and values cannot be kept as int8."""
    if not on_cpu:
        raise ConfigError("--kv-cache-dtype: int8 runs on the CPU so far; leave it out, or use --device cpu")
    if spec.head_dim % 4:
        raise ConfigError(
            f"--kv-cache-dtype: int8 keeps heads of a multiple of 4 dims, and this model's have {spec.head_dim}; leave it out"
        )


CAPTURED = 1024  # rows: a larger step keeps the device busy for longer than its launches take


def _device(config: Config, spec: ModelSpec, hardware: Hardware, dtype: str, seqs: int) -> Iterator[tuple[str, tuple[Any, str]]]:
    """What DeviceConfig leaves open."""
    device, cuda = config.device, hardware.device == "cuda"
    if not cuda:
        for name, mend in (("deterministic", "use --dtype float32"), ("max_cudagraph_capture_size", "leave it out")):
            if getattr(device, name):
                raise ConfigError(f"{flag_of(name)}: is for GPUs; on the CPU {mend}")
    backend = device.attention_backend
    if backend == "triton" and not cuda:
        raise ConfigError("--attention-backend: triton needs a CUDA device; on the CPU use torch")
    unable = cuda and _unpaged(spec, hardware, dtype)
    if unable and (backend == "triton" or device.deterministic):
        raise ConfigError(f"{'--attention-backend: triton' if backend == 'triton' else '--deterministic:'} cannot run this model: {unable}")
    if device.deterministic and backend == "torch":
        raise ConfigError("--attention-backend: --deterministic needs triton")
    if backend == "auto":
        if not cuda or unable:
            backend, why = "torch", unable or "the one for CPUs"
        elif dtype == "float32" and not device.deterministic:
            backend, why = "torch", "float32 by cuBLAS"
        else:
            backend, why = "triton", "reads the cache where it lies, and can be captured in graphs"
        yield "attention_backend", (backend, why)
    largest = device.max_cudagraph_capture_size
    if backend == "torch" and largest is not None:
        raise ConfigError("--max-cudagraph-capture-size: only attention by triton can be captured, and here torch does it; leave it out")
    if largest is not None and largest > seqs:
        yield "max_cudagraph_capture_size", (seqs, f"{largest} asked, but a step has at most {seqs} rows")
    if backend == "triton" and not device.enforce_eager and largest is None:
        reason = "--max-num-seqs" if seqs <= CAPTURED else "larger steps hide their launches"
        yield "max_cudagraph_capture_size", (min(seqs, CAPTURED), reason)


def _unattended(spec: ModelSpec) -> bool:
    """The native library does not attend this model's heads. kernels/attention.py:in_place_runs holds the same limits."""
    return bool(spec.head_dim % 16) or spec.head_dim > 256 or spec.num_heads // spec.num_kv_heads > 8


def _unpaged(spec: ModelSpec, hardware: Hardware, dtype: str) -> str:
    """Why the paged attention kernels cannot run a model; "" when they can. kernels/attention.py:paged_runs holds the same limits."""
    most, group = 128 if dtype == "float32" else 256, spec.num_heads // spec.num_kv_heads
    if hardware.capability is not None and hardware.capability < (8, 0):
        return f"compute capability {hardware.capability[0]}.{hardware.capability[1]}, 8.0 is needed"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if spec.head_dim % 16 or spec.head_dim > most:
        return f"heads of {spec.head_dim} dims; multiples of 16 up to {most} are possible in {dtype}"
    return f"{group} query heads to a key/value head; up to 64 are possible" if group > 64 else ""


def _dtype(spec: ModelSpec, hardware: Hardware) -> tuple[str, str]:
    """A working dtype near the checkpoint's own, and why."""
    own = spec.dtype
    if own == "float16" and hardware.device == "cuda":
        return "float16", "the checkpoint's own"
    if hardware.has_bfloat16:
        return (
            "bfloat16",
            "the checkpoint's own" if own == "bfloat16" else f"checkpoint is {own}; bfloat16 keeps its range in half the bytes",
        )
    if hardware.device == "cuda":
        return "float16", f"{hardware.name} has no bfloat16"
    return "float32", "this CPU has no bfloat16 arithmetic"


def cache_dir() -> Path:
    """Where flatout keeps downloads and measurements: FLATOUT_CACHE, else XDG_CACHE_HOME/flatout, else ~/.cache/flatout."""
    own = os.environ.get("FLATOUT_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flatout"


def hub_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
