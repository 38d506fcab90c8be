"""LlamaCpp: a GGUF file in llama.cpp, to be measured against: through the low-level API of the package llama-cpp-python.

llama.cpp batches (one token of each sequence a step); Python hands ids over and takes the likeliest, faster than llama.cpp's own sampler.
llama_cpp is imported here alone, when it is asked for. Called by compare_cpu.py, and in processes of their own by processes.py.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from typing import Any

import numpy as np

from flatout.config import ConfigError

FLASH_ATTN = {"off": 0, "on": 1, "auto": -1}  # llama_flash_attn_type
# What is best differs on a CPU with AMX: a prefill of 1,024 gives 500 tok/s without flash attention and 750 with it, decode at batch 1 gives
# 120 and 70, at batch 8 330 and 165
BEST = "best"


def library() -> Any:
    """The module llama_cpp. ConfigError: it, or what it needs, is not installed."""
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        raise ConfigError(f"bench compare-cpu: {error.name} is not installed; pip install llama-cpp-python") from None
    return llama_cpp


def chosen_flash_attn(asked: str, new: int) -> str:
    """Of FLASH_ATTN, for work that writes `new` tokens after each prompt."""
    return asked if asked != BEST else "on" if new == 1 else "off"


class LlamaCpp:
    """`threads` compute prompts and decodes alike; keys and values are float16, as llama.cpp has them unless told otherwise.
    `flash_attn`: of FLASH_ATTN, or BEST: on where a prompt is all of the work, off where tokens are decoded.

    Raises ConfigError: llama_cpp is not installed, or llama.cpp does not load the file.
    """

    def __init__(self, file: str | os.PathLike[str], threads: int, flash_attn: str = BEST):
        self.api, self.threads, self.flash_attn = library(), threads, flash_attn
        self._silence = self.api.llama_log_callback(lambda level, text, data: None)  # kept: llama.cpp calls it as long as it lives
        self.api.llama_log_set(self._silence, ctypes.c_void_p(0))
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self.api.llama_model_load_from_file(os.fsencode(file), params)
        if not self._model:
            raise ConfigError(f"{os.fspath(file)}: llama.cpp does not load it; give a GGUF file that it knows (--gguf)")
        self._vocab_size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._made_for = (0, 0, 0)  # the context: sequences, tokens of a prompt, tokens to write

    @property
    def versions(self) -> dict[str, str]:
        """Of the package, and what llama.cpp was built with: "AVX512_VNNI AMX_INT8 OPENMP ..."."""
        built = re.findall(r"(\w+) = 1", self.api.llama_print_system_info().decode())
        return {"llama-cpp-python": self.api.__version__, "built with": " ".join(built)}

    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[float]]:
        """Greedy ids of each prompt (all of one length), and the clock at each step's end. RuntimeError: llama.cpp failed."""
        api, length, times = self.api, len(prompts[0]), []
        self._make_context(len(prompts), length, new)
        api.llama_memory_clear(api.llama_get_memory(self._context), False)
        batch = api.llama_batch_init(len(prompts) * length, 0, 1)
        try:
            written = [[token] for token in self._step(batch, prompts, 0)]
            times.append(time.perf_counter())
            for position in range(length, length + new - 1):
                following = self._step(batch, [ids[-1:] for ids in written], position)
                times.append(time.perf_counter())
                for ids, token in zip(written, following):
                    ids.append(token)
        finally:
            api.llama_batch_free(batch)
        return written, times

    def close(self) -> None:
        if self._context:
            self.api.llama_free(self._context)
        self.api.llama_model_free(self._model)

    def _step(self, batch: Any, tokens: list[list[int]], begin: int) -> list[int]:
        """Compute each sequence's tokens, the first of which stands at position `begin`; the token that follows each."""
        api, n, lasts = self.api, 0, []
        for sequence, ids in enumerate(tokens):
            for position, token in enumerate(ids, begin):
                batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, position, 1, 0
                batch.seq_id[n][0] = sequence
                n += 1
            batch.logits[n - 1] = 1
            lasts.append(n - 1)
        batch.n_tokens = n
        if code := api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp: llama_decode of {n} tokens gave {code}")
        return [self._likeliest(last) for last in lasts]

    def _likeliest(self, n: int) -> int:
        """After the n-th token of the batch. For 49,152 logits llama_sampler_sample with its greedy sampler takes 130 to 200 us, this 9."""
        logits = self.api.llama_get_logits_ith(self._context, n)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def _make_context(self, sequences: int, prompt: int, new: int) -> None:
        """As large as the work needs, and kept for work of the same shape: making one is no part of the work."""
        if self._made_for == (sequences, prompt, new):
            return
        if self._context:
            self.api.llama_free(self._context)
        params = self.api.llama_context_default_params()
        params.n_ctx = params.n_batch = sequences * (prompt + new)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = FLASH_ATTN[chosen_flash_attn(self.flash_attn, new)]
        params.no_perf = True
        self._context = self.api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp: no context of {sequences} x {prompt + new} tokens")
        self._made_for = (sequences, prompt, new)
