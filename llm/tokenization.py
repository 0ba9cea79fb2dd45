"""Text to token ids and back: one tokenizer for all threads, and the decoder of one sequence's output."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from llm.detokenization import Detokenizer
from llm.exceptions import InvalidRequest, ModelRefused
from llm.sequence import FinishReason, SamplingParams
from llm.stops import StopMatcher
from llm.token_bound import token_bound


class Tokenization:
    """What `tokenizer.json` says, and nothing else: a tokenizer_config.json beside it (`add_bos_token`, clean-up of
    spaces) counts only as far as it was written into `tokenizer.json`, as conversions do.

    Truncation and padding are switched off once, at the start; afterwards nothing of the shared object is changed, so
    any number of threads may use it at once. Long texts are worked on outside the interpreter's lock.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # an id below it may still have no token: `token`
        self.longest_token = max(map(len, vocabulary), default=0)  # characters
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.empty_ids = tuple(self.encode("", add_special_tokens=True))  # what "" becomes: BOS, where one is added
        self.detokenizer = Detokenizer(tokenizer)
        self._bound = token_bound(tokenizer, vocabulary)

    @classmethod
    def load(cls, folder: Path) -> "Tokenization":
        """Raises ModelRefused for a folder whose tokenizer.json is absent or can't be read."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelRefused(f"{folder.name} has no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise ModelRefused(f"the tokenizer.json of {folder.name} can't be read: {error}") from error
        return cls(tokenizer)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without one, which decodes to no text."""
        return self._tokenizer.id_to_token(token_id)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call lets other threads run meanwhile; the call for one text doesn't.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])

    def fewest_tokens(self, text: str) -> int:
        """No encoding of this text is shorter; costs nothing. 0 where this tokenizer can drop or merge text freely."""
        return self._bound.fewest_tokens(text) if self._bound else 0

    def bad_word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the words, at the start of a text and behind a space.

        Raises InvalidRequest for a word that has no tokens here.
        """
        found: dict[tuple[int, ...], None] = {}
        for i, word in enumerate(words):
            stem = word.lstrip() or word
            spellings = [tuple(self.encode(prefix + stem, add_special_tokens=False)) for prefix in ("", " ")]
            if not spellings[0]:
                raise InvalidRequest(f"bad_words[{i}]", f"bad_words[{i}] has no tokens in this model's vocabulary")
            found.update(dict.fromkeys(spellings))
        return tuple(found)


class IncrementalDecoder:
    """The text of one sequence's output: decoded as tokens come, cut at a stop string.

    The pieces that `take`, `push`, `push_end_token` and `finish` return, joined, are decode(prompt + output) beyond
    decode(prompt) (`llm/detokenization.py` says it exactly), up to the stop. A piece never ends inside a character and
    never holds a part of a stop string; it may be empty. After each call `stop_match` is the stop string that completed
    with it, if any: then generation ends with this token, and the text is complete. Look at it after the last call,
    too: the last characters may complete a stop.
    """

    def __init__(self, tokenization: Tokenization, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._stream = tokenization.detokenizer.stream(prompt_ids, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._include_end_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._finished = False

    @property
    def stop_match(self) -> str | None:
        return self._stops.match

    def take(self, token_id: int, finish: FinishReason | None) -> str:
        """`push` or `push_end_token`, by how the sequence ends with this token; None: another follows."""
        if finish is FinishReason.STOP:
            return self.push_end_token(token_id)
        return self.push(token_id, last=finish is FinishReason.LENGTH)

    def push(self, token_id: int, *, last: bool = False) -> str:
        """The text that may be sent now. `last`: nothing follows (max_tokens is reached), so nothing is held back.

        A stop string that completes within the first min_tokens tokens doesn't count.
        """
        self._num_tokens += 1
        text = self._stops.push(self._stream.push(token_id), looking=self._num_tokens > self._min_tokens)
        return text + self.finish() if last else text

    def push_end_token(self, token_id: int) -> str:
        """For the token that ended the sequence, an end token or one of stop_token_ids: instead of `push`.

        Its own text belongs to the output only with include_stop_str_in_output. Returns all that was held back.
        """
        if self._include_end_token:
            return self.push(token_id, last=True)
        self._num_tokens += 1
        return self.finish()

    def finish(self) -> str:
        """What was held back, where the sequence ends without another token. A character that is still incomplete
        becomes U+FFFD, as decoding the whole gives. A second call gives nothing."""
        if self._finished:
            return ""
        self._finished = True
        text = self._stops.push(self._stream.finish(), looking=self._num_tokens > self._min_tokens)
        return text + self._stops.finish()
