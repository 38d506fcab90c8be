"""Sampler: logits of a step's rows -> one id a row and the logprobs that were asked, with vLLM's parameters and vLLM's order.

Keeps what each slot's request asked and, on the device, the earlier tokens of those that penalties or bad words look at; the kernels do
the arithmetic. The order is that of vLLM's V1 sampler (vllm/v1/sample/sampler.py; its second runner differs only in where masks stand,
which commute with the rest): raw logprobs; logit_bias; repetition, then frequency and presence penalty; min_tokens, bad_words and
allowed_token_ids; temperature; min_p; top_k; top_p; draw. Called by runner.py, by one thread, in the order of the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatout.kernels import logit_edits, sampling
from flatout.kernels.upload import upload
from flatout.request import Request, RequestError

NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, frequency, presence
GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM


@dataclass(slots=True)
class Logprobs:
    """Raw logprobs of N rows on the device. Rows that did not ask hold zeros."""

    chosen: Tensor  # float32 [N] of the sampled or given token
    ranks: Tensor  # int32 [N] tokens at least as likely, as vLLM counts: 1 is the likeliest
    top_ids: Tensor  # int32 [N, K] falling
    top_logprobs: Tensor  # float32 [N, K]

    def map(self, move: Callable[[Tensor], Tensor]) -> Logprobs:
        return Logprobs(move(self.chosen), move(self.ranks), move(self.top_ids), move(self.top_logprobs))


@dataclass(slots=True)
class Sampled:
    ids: Tensor  # int64 [S] on the device
    logprobs: Logprobs | None  # of S rows, K the largest asked; None when no row asked


@dataclass(slots=True)
class _Edits:
    """What one slot's request does to its logits before a token is chosen. Ids are int64 arrays."""

    bias_ids: np.ndarray
    bias: np.ndarray  # float64
    penalties: tuple[float, float, float] | None  # repetition, frequency, presence
    end_ids: np.ndarray  # banned before min_tokens
    min_tokens: int
    banned_ids: np.ndarray
    words: list[np.ndarray]  # bad words of several tokens
    allowed_ids: np.ndarray | None
    history: int = -1  # row of the history
    prompt: int = 0  # distinct prompt ids there


class Sampler:
    """`vocab_size` columns of logits, `max_slots` live requests. Methods never wait for the device."""

    def __init__(self, vocab_size: int, max_slots: int, device: torch.device):
        self.vocab_size = vocab_size
        self.device = device
        self._hashes = sampling.token_hashes(vocab_size, device)
        self._history = _History(device)
        # by slot
        self._temperature = np.zeros(max_slots)  # 0: greedy
        self._filters = np.zeros((max_slots, 3))  # top_p, min_p, top_k (the vocabulary's size: off)
        self._keys = np.zeros(max_slots, np.uint64)
        self._logprobs = np.full(max_slots, -1)  # alternatives asked; -1: no logprobs at all
        self._edits: dict[int, _Edits] = {}  # of slots that change their logits; the others cost nothing
        self._asking: set[int] = set()  # slots that ask for more than the likeliest token

    def admit(self, slot: int, request: Request) -> None:
        """Give the slot to a request, or back to one that was preempted: its output_ids so far count. Raises RequestError."""
        params = request.params
        edits = _read_edits(request, self.vocab_size)
        # The choice that top_k 1 leaves is the greedy one, at the price of an argmax.
        self._temperature[slot] = 0.0 if params.temperature < GREEDY_BELOW or params.top_k == 1 else params.temperature
        self._filters[slot] = params.top_p, params.min_p, min(params.top_k or self.vocab_size, self.vocab_size)
        self._keys[slot] = sampling.sequence_key(request.seed, request.index)
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        plain = edits is None and self._temperature[slot] == 0 and params.logprobs is None
        (self._asking.discard if plain else self._asking.add)(slot)
        previous = self._edits.pop(slot, None)
        if previous is not None and previous.history >= 0:
            self._history.give_back(previous.history)
        if edits is None:
            return
        self._edits[slot] = edits
        if edits.penalties or edits.words:
            prompt = np.empty(0, np.int64)
            if edits.penalties and edits.penalties[0] != 1.0:
                prompt = np.unique(np.asarray(request.prompt_ids, np.int64))
                prompt = prompt[(prompt >= 0) & (prompt < self.vocab_size)]  # placeholders of other media have no logit
            edits.prompt = len(prompt)
            edits.history = self._history.take(np.concatenate([prompt, np.asarray(request.output_ids, np.int64)]))

    def plainly_greedy(self, slots: np.ndarray) -> bool:
        """Whether these slots (int32 [S]) ask for nothing but each row's likeliest token: then sample() is the op greedy. By no numpy, which lets
        Python's lock go: the engine's thread would take it for its own work just before a step (a quarter of a millisecond)."""
        return self._asking.isdisjoint(slots.tolist())

    def sample(self, logits: Tensor, slots: np.ndarray, out_positions: np.ndarray) -> Sampled:
        """Choose a token for each row of logits (float32 [S, vocab_size], contiguous; may be overwritten).

        slots, out_positions int32 [S]: whose rows these are and which output token each would be (0: the first).
        A NaN or -inf logit counts as the lowest finite float32, +inf as the highest. Where masks leave nothing, the lowest id of what
        allowed_token_ids allow is chosen.
        """
        rows, vocab = logits.shape
        if vocab != self.vocab_size or rows != len(slots) or logits.dtype != torch.float32 or not logits.is_contiguous():
            raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype} are not contiguous float32 [{len(slots)}, {self.vocab_size}]")
        if self.plainly_greedy(slots):
            ids = torch.empty(rows, dtype=torch.int64, device=self.device)
            logit_edits.clean_logits(logits, ids[:0])
            sampling.greedy(ids, logits)
            return Sampled(ids, None)
        edited = [(row, self._edits[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._edits]
        positions = out_positions.tolist()
        staged = _Staged(self.device)
        staged["edited"] = np.array([row for row, _ in edited], np.int64)
        longest = self._stage_edits(staged, edited, positions)
        self._stage_draws(staged, slots, out_positions)
        asked = np.flatnonzero(self._logprobs[slots] >= 0)
        staged["asked"] = asked
        staged.send()

        logit_edits.clean_logits(logits, staged["edited"])
        raw = logits
        if len(asked) and (edited or len(asked) < rows):
            raw = logits.index_select(0, staged["asked"])
        if edited:
            self._edit(logits, staged, longest)
        ids = torch.empty(rows, dtype=torch.int64, device=self.device)
        sampling.greedy(ids, logits)
        if "drawn" in staged:
            sampling.draw(ids, logits, staged["drawn"], staged["params"], staged["keys"], self._hashes)
        if "append" in staged:
            logit_edits.append_tokens(self._history.tokens, staged["append"], ids, staged["append rows"])
        if not len(asked):
            return Sampled(ids, None)
        part = self._rate(raw, ids[staged["asked"]], int(self._logprobs[slots].max()))
        if len(asked) == rows:
            return Sampled(ids, part)
        return Sampled(ids, part.map(lambda t: t.new_zeros((rows, *t.shape[1:])).index_copy_(0, staged["asked"], t)))

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> Logprobs:
        """Logprobs of targets (int64 [N]) under logits (float32 [N, vocab_size]; NaNs are overwritten) and of each row's first k."""
        logit_edits.clean_logits(logits, torch.empty(0, dtype=torch.int64, device=self.device))
        return self._rate(logits, targets, k)

    def _rate(self, logits: Tensor, ids: Tensor, k: int) -> Logprobs:
        rows, k = len(ids), min(k, self.vocab_size)
        out = Logprobs(
            torch.empty(rows, dtype=torch.float32, device=self.device),
            torch.empty(rows, dtype=torch.int32, device=self.device),
            torch.empty(rows, k, dtype=torch.int32, device=self.device),
            torch.empty(rows, k, dtype=torch.float32, device=self.device),
        )
        sampling.token_logprobs(out.chosen, out.ranks, out.top_ids, out.top_logprobs, logits, ids)
        return out

    def _stage_draws(self, staged: _Staged, slots: np.ndarray, out_positions: np.ndarray) -> None:
        """Stage which rows are drawn, with what filters and random numbers."""
        drawn = np.flatnonzero(self._temperature[slots])
        if len(drawn):
            members = slots[drawn]
            staged["drawn"] = drawn
            staged["params"] = np.concatenate([self._temperature[members, None], self._filters[members]], axis=1)
            staged["keys"] = sampling.position_keys(self._keys[members], out_positions[drawn])

    def _stage_edits(self, staged: _Staged, edited: list[tuple[int, _Edits]], positions: list[int]) -> int:
        """Stage the cells that the rows' edits touch. Returns the longest history that penalties read."""
        vocab = self.vocab_size
        needed = [edits.prompt + positions[row] + 1 for row, edits in edited if edits.history >= 0]
        if needed:
            self._history.widen(max(needed))
        width = self._history.tokens.shape[1]
        longest = 0
        # cell of the word's last token, cell of the history where the next output token goes, the tokens before the last
        words: list[tuple[int, int, np.ndarray]] = []
        for row, edits in edited:
            position, first = positions[row], row * vocab
            if len(edits.bias_ids):
                staged.add("bias", first + edits.bias_ids)
                staged.add("bias values", edits.bias)
            if len(edits.banned_ids):
                staged.add("banned", first + edits.banned_ids)
            if position < edits.min_tokens and len(edits.end_ids):
                staged.add("banned", first + edits.end_ids)
            if edits.allowed_ids is not None:
                staged.add("allowed", first + edits.allowed_ids)
                staged.add("allowed rows", [row])
            if edits.history >= 0:
                total = edits.prompt + position
                here = edits.history * width + total
                staged.add("append", [here])
                staged.add("append rows", [row])
                if edits.penalties:
                    staged.add("spans", [row, edits.history, edits.prompt, total])
                    staged.add("penalties", np.array(edits.penalties))
                    longest = max(longest, total)
                for word in edits.words:
                    if len(word) - 1 <= position:
                        words.append((first + int(word[-1]), here, word[:-1]))
        if words:
            reach = max(len(prefix) for _, _, prefix in words)
            staged["words"] = np.array([cell for cell, _, _ in words])
            staged["word tails"] = np.array([np.arange(here - reach, here) for _, here, _ in words]).clip(min=0)
            staged["word prefixes"] = np.array([np.pad(prefix, (reach - len(prefix), 0), constant_values=-1) for _, _, prefix in words])
        return longest

    def _edit(self, logits: Tensor, staged: _Staged, longest: int) -> None:
        """Masks come last: -inf plus or times anything stays -inf, so their place among the edits does not matter."""
        history = self._history.tokens
        if "bias" in staged:
            logit_edits.add_bias(logits, staged["bias"], staged["bias values"].float())
        if longest:
            logit_edits.penalise(logits, history, staged["spans"].view(-1, 4), staged["penalties"].view(-1, 3).float(), longest)
        if "banned" in staged:
            logit_edits.ban_tokens(logits, staged["banned"])
        if "words" in staged:
            logit_edits.ban_words(logits, staged["words"], history, staged["word tails"], staged["word prefixes"])
        if "allowed" in staged:
            logit_edits.allow_only(logits, staged["allowed rows"], staged["allowed"])


def _read_edits(request: Request, vocab_size: int) -> _Edits | None:
    """None when the request changes no logit."""
    params = request.params
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    asks = params.logit_bias or params.min_tokens or request.bad_words_ids or params.allowed_token_ids is not None
    if not asks and penalties == NO_PENALTIES:
        return None  # nearly all: the arrays below take 30 us

    def ids(name: str, tokens: Sequence[int]) -> np.ndarray:
        array = np.unique(np.asarray(tokens, np.int64))
        if len(array) and not 0 <= array[0] <= array[-1] < vocab_size:  # it would be another row's logit
            raise RequestError(name, f"token ids must be from 0 to {vocab_size - 1}, got {array[0]} to {array[-1]}")
        return array

    bias = params.logit_bias or {}
    words = [word for word in request.bad_words_ids if word]
    ends = [token for token in request.eos_ids if token < vocab_size]  # a model may name an end id that it has no logit for
    edits = _Edits(
        bias_ids=ids("logit_bias", sorted(bias)),
        bias=np.array([bias[token] for token in sorted(bias)], np.float64),
        penalties=penalties if penalties != NO_PENALTIES else None,
        # under ignore_eos too, as in vLLM
        end_ids=ids("stop_token_ids", [*ends, *(params.stop_token_ids or ())]) if params.min_tokens else np.empty(0, np.int64),
        min_tokens=params.min_tokens,
        banned_ids=ids("bad_words", [word[0] for word in words if len(word) == 1]),
        words=[np.asarray(word, np.int64) for word in words if len(word) > 1],
        allowed_ids=None if params.allowed_token_ids is None else ids("allowed_token_ids", params.allowed_token_ids),
    )
    ids("bad_words", [token for word in words for token in word])
    anything = (
        edits.penalties or edits.words or edits.allowed_ids is not None or any(map(len, (edits.bias_ids, edits.end_ids, edits.banned_ids)))
    )
    return edits if anything else None


class _History:
    """Earlier tokens of the slots that penalties or bad words look at: `tokens` int32 [rows, width] on the device.

    A row holds what take() wrote (distinct prompt ids, then output ids) and grows by what sample() appends, because the host plans the
    next step before it knows the ids. Rows and width grow on demand, so nothing is spent when nobody uses it.
    """

    def __init__(self, device: torch.device):
        self.tokens = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def take(self, ids: np.ndarray) -> int:
        """A row that starts with ids."""
        if not self._free:
            rows = self.tokens.shape[0]
            self._grow(max(4, 2 * rows), self.tokens.shape[1])
            self._free = list(range(rows, self.tokens.shape[0]))
        row = self._free.pop()
        self.widen(len(ids) + 1)
        self.tokens[row, : len(ids)] = upload(self.tokens.device, [ids.astype(np.int32)])[0]
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def widen(self, width: int) -> None:
        if width > self.tokens.shape[1]:
            self._grow(self.tokens.shape[0], max(256, width, 2 * self.tokens.shape[1]))

    def _grow(self, rows: int, width: int) -> None:
        larger = self.tokens.new_zeros(rows, width)
        larger[: self.tokens.shape[0], : self.tokens.shape[1]] = self.tokens
        self.tokens = larger


class _Staged:
    """Host arrays (int64 or float64) by name that go to the device in one copy; afterwards the tensors of those names."""

    def __init__(self, device: torch.device):
        self._device = device
        self._parts: dict[str, list[np.ndarray]] = {}
        self._tensors: dict[str, Tensor] = {}

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self._parts[name] = [array]

    def add(self, name: str, values: np.ndarray | list[int]) -> None:
        """Append to what the name has so far."""
        self._parts.setdefault(name, []).append(np.asarray(values))

    def send(self) -> None:
        arrays = [np.concatenate(parts) for parts in self._parts.values()]
        self._tensors = dict(zip(self._parts, upload(self._device, arrays)))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]
