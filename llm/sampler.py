"""Logits to tokens: every sampling parameter, the draw, and the log-probabilities that are reported.

Order of a row: logit_bias and bans, min_tokens, penalties, temperature, top_k, top_p, min_p, typical_p, the draw. A row's
result depends on its own logits, parameters, tokens and seed only: each row is computed by itself from a contiguous
[vocab] row, in one thread, so that batch mates change no bit of it. Only an argmax, which rounds nothing, is taken of
many rows at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from llm import sampling_filters
from llm.exceptions import SequenceFailed
from llm.messages import LEAST_LOGPROB, NewSequence, TokenLogprob
from llm.philox import draw
from llm.sequence import SamplingParams

Row = NDArray[np.float32]  # [vocab], where nothing else is said

NO_FINITE_LOGITS = "the model gave no finite logits"
NO_TOKEN_LEFT = "bad_words and min_tokens together left no token to choose"  # noqa: S105
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Either a token, with its log-probability where that was asked for, or why this row has none."""

    token_id: int | None
    logprob: TokenLogprob | None
    error: str | None


class Sampler:
    """Holds what the sampling of each known sequence depends on; `add` builds it from the tokens, so that a sequence may
    be forgotten and added again at any point of its life."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._states: dict[int, _State] = {}

    def add(self, new: NewSequence) -> None:
        """O(tokens). Replaces what is known of the sequence."""
        self._states[new.seq_id] = _State(new, self._eos_token_ids, self._vocab_size)

    def forget(self, seq_id: int) -> None:
        """Nothing happens for an unknown sequence."""
        self._states.pop(seq_id, None)

    def sample(self, seq_ids: Sequence[int], logits: torch.Tensor) -> list[Drawn]:
        """The next token of each sequence. `logits`: [len(seq_ids), vocab] float32; it is not changed.

        Each token is appended to its sequence's state.
        """
        states = [self._states[seq_id] for seq_id in seq_ids]
        plain = [i for i, state in enumerate(states) if state.is_plain]
        drawn: dict[int, Drawn] = dict(zip(plain, self._argmax(plain, logits), strict=True))
        others = [i for i in range(len(states)) if i not in drawn]
        drawn.update((i, states[i].sample(row)) for i, row in zip(others, _on_host(self._rows(others, logits)), strict=True))
        for i, state in enumerate(states):
            token = drawn[i].token_id
            if token is not None:
                state.append(token)
        return [drawn[i] for i in range(len(states))]

    def prompt_logprobs(self, token_ids: Sequence[int], logits: torch.Tensor, top: int) -> tuple[TokenLogprob, ...]:
        """`logits`: [len(token_ids), vocab] float32; row i predicts token_ids[i]. `top`: alternatives beside each.

        Raises SequenceFailed where a row is not finite.
        """
        return tuple(_logprob(row, token, top) for token, row in zip(token_ids, _on_host(logits), strict=True))

    def _argmax(self, chosen: list[int], logits: torch.Tensor) -> list[Drawn]:
        if not chosen:
            return []
        rows = self._rows(chosen, logits)
        tokens = rows.argmax(dim=-1)  # of equal ones the first; a NaN is the largest
        finite = rows.gather(1, tokens[:, None])[:, 0].isfinite().tolist()
        return [
            Drawn(token, None, None) if good else Drawn(None, None, NO_FINITE_LOGITS)
            for token, good in zip(tokens.tolist(), finite, strict=True)
        ]

    def _rows(self, chosen: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits if len(chosen) == len(logits) else logits[torch.tensor(chosen, dtype=torch.long, device=self._device)]


class _State:
    """One sequence: its parameters, what they made of its tokens so far, and its tokens."""

    def __init__(self, new: NewSequence, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        params = new.params
        self._params = params
        self._seed = new.seed
        self._tokens = list(new.token_ids)
        self._num_output = len(new.token_ids) - new.num_prompt_tokens
        self._greedy = params.greedy or params.min_p == 1.0  # min_p 1 keeps the best token, and what ties with it
        self._biased = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float64)
        # A tokenizer may have tokens, and a checkpoint name end tokens, that the model has no logits of.
        self._bans = tuple((word[:-1], word[-1]) for word in new.bad_word_ids if word[-1] < vocab_size)
        ends = {token for token in (*eos_token_ids, *params.stop_token_ids) if token < vocab_size}
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._penalties = _Penalties(self._tokens, new.num_prompt_tokens, params) if _penalized(params) else None
        self._untouched = not len(self._biased) and not self._bans and self._penalties is None

    @property
    def is_plain(self) -> bool:
        """The next token is the argmax of the raw logits, and nothing else is asked for."""
        return self._greedy and self._untouched and not self._below_min_tokens and self._params.logprobs is None

    @property
    def _below_min_tokens(self) -> bool:
        return self._num_output < self._params.min_tokens

    def append(self, token: int) -> None:
        self._tokens.append(token)
        self._num_output += 1
        if self._penalties is not None:
            self._penalties.count(token)

    def sample(self, raw: Row) -> Drawn:
        if not np.isfinite(raw.max()):  # NaN, if there is one
            return Drawn(None, None, NO_FINITE_LOGITS)
        row = self._transformed(raw)
        largest = row.max()
        if largest == -np.inf:
            return Drawn(None, None, NO_TOKEN_LEFT)
        token = int(row.argmax()) if self._greedy else self._draw(row, float(largest))
        top = self._params.logprobs
        return Drawn(token, None if top is None else _logprob(raw, token, top), None)

    def _transformed(self, raw: Row) -> Row:
        """After bias, bans, min_tokens and penalties; a banned token has minus infinity."""
        row = raw.copy()
        row[self._biased] += self._bias.astype(np.float32)
        for before, banned in self._bans:
            if not before or tuple(self._tokens[-len(before) :]) == before:
                row[banned] = -np.inf
        if self._below_min_tokens:
            row[self._ends] = -np.inf
        if self._penalties is not None:
            self._penalties.apply(row)
        return row

    def _draw(self, row: Row, largest: float) -> int:
        with np.errstate(over="ignore"):  # a temperature near 0 makes minus infinities of all but the best, rightly
            values = (row.astype(np.float64) - largest) / self._params.temperature
        tokens = np.flatnonzero(values > -np.inf)
        values = values[tokens]
        for keep in _filters(self._params):
            kept = keep(values)
            tokens, values = tokens[kept], values[kept]
        return int(tokens[draw(values, tokens, self._seed, len(self._tokens))])


class _Penalties:
    """The distinct tokens of a sequence, and how often each is in its output."""

    def __init__(self, tokens: Sequence[int], num_prompt_tokens: int, params: SamplingParams) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._tokens = np.unique(np.array(tokens, dtype=np.int64))
        self._slots = {token: slot for slot, token in enumerate(self._tokens.tolist())}
        self._counts = np.zeros(len(self._tokens))
        for token in tokens[num_prompt_tokens:]:
            self.count(token)

    def count(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._tokens):
            self._tokens = np.append(self._tokens, token)
            self._counts = np.append(self._counts, 0.0)
        self._counts[slot] += 1

    def apply(self, row: Row) -> None:
        """repetition divides a positive logit and multiplies a negative one, as transformers does (Keskar et al.:
        "CTRL", 2019); presence and frequency are taken off as OpenAI's reference says."""
        values = row[self._tokens].astype(np.float64)
        with np.errstate(over="ignore"):
            values = np.where(values < 0, values * self._repetition, values / self._repetition)
        values -= self._frequency * self._counts + self._presence * (self._counts > 0)
        row[self._tokens] = np.where(np.isneginf(row[self._tokens]), -np.inf, values.clip(-_LARGEST, _LARGEST))


def _penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _filters(params: SamplingParams) -> list[Callable[[NDArray[np.float64]], NDArray[np.int64]]]:
    filters: list[Callable[[NDArray[np.float64]], NDArray[np.int64]]] = []
    if params.top_k > 0:
        filters.append(lambda values: sampling_filters.top_k(values, params.top_k))
    if params.top_p < 1:
        filters.append(lambda values: sampling_filters.top_p(values, params.top_p))
    if params.min_p > 0:
        filters.append(lambda values: sampling_filters.min_p(values, params.min_p))
    if params.typical_p < 1:
        filters.append(lambda values: sampling_filters.typical_p(values, params.typical_p))
    return filters


def _on_host(rows: torch.Tensor) -> Row:
    """[rows, vocab], without a copy where it is there already."""
    values: Row = rows.detach().to("cpu", torch.float32).contiguous().numpy()
    return values


def _logprob(raw: Row, token: int, top: int) -> TokenLogprob:
    """Of the log-softmax of the raw logits."""
    largest = float(raw.max())
    if not np.isfinite(largest):
        raise SequenceFailed(NO_FINITE_LOGITS)
    shift = largest + float(np.log(np.exp(raw.astype(np.float64) - largest).sum()))
    alternatives = sampling_filters.best(raw, top).tolist() if top else []

    def value(i: int) -> float:
        return max(float(raw[i]) - shift, LEAST_LOGPROB)

    return TokenLogprob(token, value(token), tuple((i, value(i)) for i in alternatives))
