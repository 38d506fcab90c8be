"""A model on paper: its settings resolved for a machine, its cost table and its memory, with nothing loaded but the model's headers.

The machine is this one or a GPU by its data sheet; schemes and types that the engine does not run there yet may be asked about too. Called by
plan/, whatif.py and cli/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from flatout.config import Config, ConfigError, resolve
from flatout.doctor.measure import matrix_and_launch_rates
from flatout.hardware import Hardware, ceilings, detect
from flatout.kernels import native
from flatout.ledger.roofs import data_sheet, roof_of
from flatout.ledger.table import CostTable, Roof
from flatout.modelfile.sources import ModelSource, resolve_model
from flatout.modelfile.spec import ModelSpec
from flatout.models.decoder import Decoder
from flatout.models.load import kept_packed
from flatout.runner.costs import cost_table
from flatout.runner.packing import kept_weights

PAPER_KV = ("int8", "float8_e4m3fn", "float8_e5m2")  # of --kv-cache-dtype, on paper alone


@dataclass(frozen=True)
class OnPaper:
    """What a start with these settings would hold, in bytes, and cost."""

    config: Config  # resolved
    source: ModelSource
    spec: ModelSpec
    hardware: Hardware
    table: CostTable
    buffers: int  # of a step and its logits
    notes: tuple[str, ...]  # what is only possible on paper

    @property
    def block_bytes(self) -> int:
        return self.table.kv_bytes_token * self.config.cache.block_size


def on_paper(options: Mapping[str, Any], gpu: str | None = None, memory: int | None = None) -> OnPaper:
    """options: Config's, by flat name; kv_cache_dtype may be one of PAPER_KV too. gpu: a name that ledger/roofs.py knows; None: this machine.
    memory: bytes that it is to have instead of its own.

    Raises ConfigError or ModelFileError as a start would.
    """
    if gpu is None:
        hardware = detect(options.get("device", "auto"))
        roof = measured_roof(hardware)
    else:
        if options.get("device", "cuda") == "cpu":
            raise ConfigError("--device: cpu and --gpu contradict each other; give one of them")
        try:
            sheet = data_sheet(gpu)
        except ValueError as error:
            raise ConfigError(f"--gpu: {error}") from None
        hardware, roof = sheet.hardware(), sheet.roof
    if memory is not None:
        hardware = replace(hardware, memory_bytes=memory)
    return imagined(options, resolve_model(Config.make(**_real(options)).model), hardware, roof)


def measured_roof(hardware: Hardware) -> Roof:
    """Of this machine; what was not measured on it yet is measured now and kept (5 to 10 s)."""
    return roof_of(hardware, ceilings(hardware), matrix_and_launch_rates(hardware))


def imagined(options: Mapping[str, Any], source: ModelSource, hardware: Hardware, roof: Roof) -> OnPaper:
    """on_paper() of a model that was found and a machine that is known."""
    notes, given = [], _real(options)
    quantization, cuda = given.get("quantization", "auto"), hardware.device == "cuda"
    if cuda and quantization in ("int8", "int4", "gguf"):  # resolve() judges what runs
        notes.append(f"--quantization {quantization} is not built for GPUs yet: on paper")
        given["quantization"] = "none"
    able = cuda or native.available()
    keeps = source.gguf is not None and bool(kept_packed(source))
    config, _ = resolve(Config.make(**given), source.spec, hardware, native=able, kept=keeps and not cuda)
    if config.model.quantization != quantization != "auto":
        config = config.but(quantization=quantization)
    spec = source.spec.for_length(config.model.max_model_len or source.spec.max_position)
    kept = kept_weights(config, source, spec, able)
    notes += [kept.left] if kept.left else []
    kv_dtype = config.cache.kv_cache_dtype
    if (asked := options.get("kv_cache_dtype")) in PAPER_KV:
        kv_dtype = asked
        notes.append(f"--kv-cache-dtype {asked} is not built yet: on paper")
    table = cost_table(
        spec,
        name=source.name,
        dtype=config.model.dtype,
        kv_dtype=kv_dtype,
        packed=kept.packed,
        embedding=kept.embedding,
        runs_on=hardware.device,
        roof=roof,
    )
    scheduler = config.scheduler
    assert config.model.max_model_len and scheduler.max_num_seqs and scheduler.max_num_batched_tokens
    decoder = Decoder(
        spec,
        dtype=getattr(torch, config.model.dtype),
        device=torch.device("meta"),
        max_tokens=scheduler.max_num_batched_tokens,
        max_logits=scheduler.max_num_seqs,
        max_model_len=1,
        packed=kept.packed,
        embedding=kept.embedding,
        runs_on=hardware.device,
    )
    element = getattr(torch, config.model.dtype).itemsize
    ropes = (config.model.max_model_len - 1) * sum(2 * rope.dim * element for rope in spec.ropes)
    tables = 4 * scheduler.max_num_seqs * -(-config.model.max_model_len // config.cache.block_size)
    return OnPaper(config, source, spec, hardware, table, decoder.buffer_bytes() + ropes + tables, tuple(notes))


def _real(options: Mapping[str, Any], cuda: bool = True) -> dict[str, Any]:
    """Without what exists on paper alone."""
    kv = options.get("kv_cache_dtype")
    paper = kv in PAPER_KV and (cuda or kv != "int8")
    return {name: value for name, value in options.items() if name != "kv_cache_dtype" or not paper}
