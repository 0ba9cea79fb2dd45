"""From token ids to text, one token at a time and without ever decoding the whole again.

What a stream gives, all pieces joined, is exactly

    decode(prompt + output)  without its longest common prefix with  decode(prompt)

under the tokenizer's own decoder. For a prompt that ends between two characters, as every encoded text does, that is
simply what follows the prompt; where a prompt given as ids ends inside a character, the completed character belongs to
the output. A piece holds only what no later token can change.

Three kinds of decoder, told apart by the tokenizer's own description of them:

    bytes    ByteLevel: tokens are bytes, the text is their UTF-8
    pieces   Metaspace, WordPiece, BPEDecoder, SentencePiece's chain (Replace, ByteFallback, Fuse, Strip), none: a
             token adds the same text wherever it stands, but for the left edge, the token before it, and byte tokens
    whole    anything else (CTC, a Replace across tokens, ...): no piece is certain before the end, so all comes then
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

INVALID = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # what the decoder ByteFallback takes for a byte
_BYTE_TOKEN_CHARACTERS = frozenset("<0x>+0123456789abcdefABCDEF")
_ANCHORS = "xoea"


class TextStream(Protocol):
    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""

    def finish(self) -> str:
        """The rest, as no token follows."""


class Detokenizer:
    """Makes the streams of one tokenizer, and keeps what they share. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self._chain = _Chain.of(tokenizer)
        self._units: dict[bool, dict[int, bytes | None]] = {False: {}, True: {}}
        self._tokens: dict[bool, dict[int, str | None]] = {False: {}, True: {}}
        self._pieces: dict[str, str] = {}

    def stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        if self._chain.kind == "bytes":
            return _ByteStream(self, prompt_ids, skip_special_tokens)
        if self._chain.kind == "pieces":
            return _PieceStream(self, self._chain, prompt_ids, skip_special_tokens)
        return _WholeStream(self._tokenizer, prompt_ids, skip_special_tokens)

    def token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The token as the decoder gets it; None where it gets nothing."""
        known = self._tokens[skip_special_tokens]
        if token_id not in known:
            token = self._tokenizer.id_to_token(token_id)
            known[token_id] = None if skip_special_tokens and token in self._special else token
        return known[token_id]

    def unit(self, token_id: int, skip_special_tokens: bool) -> bytes | None:
        """A byte-level token's bytes."""
        known = self._units[skip_special_tokens]
        if token_id not in known:
            token = self.token(token_id, skip_special_tokens)
            known[token_id] = None if token is None else _token_bytes(token)
        return known[token_id]

    def piece(self, token: str) -> str:
        """The text that a token adds behind others."""
        if token not in self._pieces:
            anchor = self._chain.anchor
            self._pieces[token] = self._chain.join([anchor, token])[len(anchor) :]
        return self._pieces[token]


@dataclass(frozen=True, slots=True)
class _Chain:
    """A tokenizer's decoder, as far as streaming has to know it."""

    kind: str  # "bytes", "pieces", "whole"
    join: Callable[[list[str]], str]  # the decoder itself
    anchor: str = ""  # a token that stands for "something before"
    strip: tuple[str, int] = ("", 0)  # a character, and how many of it the text loses at its start
    looks_back: bool = False  # a token's text depends on the one before it
    has_bytes: bool = False  # tokens like <0x0A> are bytes

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "_Chain":
        decoder = tokenizer.decoder
        if decoder is None:
            return cls("pieces", " ".join, anchor="x")
        steps = _flatten(json.loads(decoder.__getstate__()), "decoders")
        before, after = _split_at_fuse(steps)
        kinds = [step["type"] for step in before]
        whole = cls("whole", decoder.decode)
        if kinds == ["ByteLevel"] and not after:
            return cls("bytes", decoder.decode)
        strip = _left_strip(after)
        anchor = next((a for a in _ANCHORS if decoder.decode([a]) == a), None)  # a character that isn't stripped, too
        if strip is None or anchor is None or not _adds_pieces(before, stripped=strip[1] > 0):
            return whole
        return cls(
            "pieces",
            decoder.decode,
            anchor=anchor,
            strip=strip,
            looks_back="BPEDecoder" in kinds,
            has_bytes="ByteFallback" in kinds,
        )


def _flatten(step: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step[key] for inner in _flatten(part, key)]


def _split_at_fuse(steps: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps that see single tokens, and steps that see the whole text."""
    at = next((i for i, step in enumerate(steps) if step["type"] == "Fuse"), len(steps))
    return steps[:at], [step for step in steps[at:] if step["type"] != "Fuse"]


def _left_strip(after: list[dict[str, Any]]) -> tuple[str, int] | None:
    """What is stripped from the whole text's start; None if more than that is done to it."""
    if not after:
        return ("", 0)
    step = after[0]
    if len(after) > 1 or step["type"] != "Strip" or step["stop"] != 0:
        return None
    return (step["content"], step["start"])


def _adds_pieces(before: list[dict[str, Any]], *, stripped: bool) -> bool:
    """Whether these steps leave each token a text of its own, by the rules that a `_PieceStream` knows."""
    kinds = [step["type"] for step in before]
    if "BPEDecoder" in kinds:
        return kinds == ["BPEDecoder"] and not stripped
    if "ByteFallback" in kinds:
        return kinds[-1] == "ByteFallback" and all(_spares_byte_tokens(step) for step in before[:-1])
    first_differs = "Metaspace" in kinds or "WordPiece" in kinds
    return set(kinds) <= {"Replace", "Strip", "Metaspace", "WordPiece"} and not (first_differs and stripped)


def _spares_byte_tokens(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern", {}).get("String")
    return step["type"] == "Replace" and bool(pattern) and _BYTE_TOKEN_CHARACTERS.isdisjoint(pattern + step["content"])


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


def _token_bytes(token: str) -> bytes:
    """As the decoder ByteLevel reads a token: an added token with a character outside of the alphabet is plain text."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


class _Utf8:
    """Incremental UTF-8: what can't become a character any more is known as such at once.

    Invalid bytes: one U+FFFD for each longest start of a character, as Rust does; or UnicodeDecodeError when strict.
    """

    def __init__(self, errors: str) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    @property
    def pending(self) -> bytes:
        return self._decoder.getstate()[0]

    def decode(self, unit: bytes) -> str:
        text = self._decoder.decode(unit)
        pending = self.pending
        if pending and pending[0] == 0xED and pending[1:] >= b"\xa0":  # Python waits for the end of a surrogate
            text += self._decoder.decode(b"", True)
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)

    def reset(self) -> None:
        self._decoder.reset()


class _Shown:
    """The end of decode(prompt) that a longer text may still replace; what is repeated of it is no output."""

    def __init__(self, text: str) -> None:
        self._text = text

    def drop_from(self, text: str) -> str:
        if not self._text or not text:
            return text
        pairs = zip(self._text, text, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._text), len(text)))
        self._text = self._text[common:] if common == len(text) else ""
        return text[common:]


class _ByteStream:
    def __init__(self, detokenizer: Detokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._unit = detokenizer.unit
        self._skip = skip_special_tokens
        self._utf8 = _Utf8("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = (self._unit(token_id, self._skip) or b"") + tail
            if len(tail) >= 3:  # no incomplete character is longer
                break
        self._utf8.decode(tail)
        self._shown = _Shown(INVALID if self._utf8.pending else "")

    def push(self, token_id: int) -> str:
        unit = self._unit(token_id, self._skip)
        return self._shown.drop_from(self._utf8.decode(unit)) if unit else ""

    def finish(self) -> str:
        return self._shown.drop_from(self._utf8.finish())


class _PieceStream:
    """Byte tokens in a row are one unit: if the run as a whole isn't UTF-8, each of its bytes becomes U+FFFD. So a run
    is certain when it ends, or at the first byte that spoils it."""

    def __init__(self, detokenizer: Detokenizer, chain: _Chain, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._detokenizer = detokenizer
        self._chain = chain
        self._skip = skip_special_tokens
        self._previous: str | None = None  # the last token with a part in the text
        self._strip = chain.strip[1]  # characters that the text's start may still lose
        self._run: list[str] = []  # byte tokens since the last other token
        self._run_utf8 = _Utf8("strict")
        self._run_spoilt = False
        self._shown = _Shown("")
        self._read_prompt(prompt_ids)

    def push(self, token_id: int) -> str:
        token = self._detokenizer.token(token_id, self._skip)
        if token is None:
            return ""
        if self._chain.has_bytes and (byte := _BYTE_TOKEN.fullmatch(token)):
            return self._push_byte(token, int(byte[1], 16))
        text = self._end_run() if self._run else ""
        if self._strip:
            text += self._strip_left(self._piece(token))
        else:
            text += self._piece(token)
        self._previous = token
        return self._shown.drop_from(text)

    def finish(self) -> str:
        return self._shown.drop_from(self._end_run())

    def _piece(self, token: str) -> str:
        if self._previous is None and not self._chain.strip[1]:
            return self._chain.join([token])
        if self._chain.looks_back and self._previous is not None:
            return self._chain.join([self._previous, token])[len(self._chain.join([self._previous])) :]
        return self._detokenizer.piece(token)

    def _push_byte(self, token: str, byte: int) -> str:
        self._previous = token
        if self._run_spoilt:
            return self._shown.drop_from(INVALID)
        self._run.append(token)
        try:
            self._run_utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._run_spoilt = True
            self._strip = 0
            return self._shown.drop_from(INVALID * len(self._run))
        return ""

    def _end_run(self) -> str:
        text = "" if self._run_spoilt or not self._run else self._strip_left(self._run_text())
        self._run = []
        self._run_utf8.reset()
        self._run_spoilt = False
        return text

    def _run_text(self) -> str:
        anchor = self._chain.anchor
        return self._chain.join([anchor, *self._run])[len(anchor) :]

    def _strip_left(self, text: str) -> str:
        while self._strip and text:
            if text[0] == self._chain.strip[0]:
                text = text[1:]
                self._strip -= 1
            else:
                self._strip = 0
        return text

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Comes to the state behind the prompt from its two ends: what lies between has no bearing on it."""
        start = 0
        while start < len(prompt_ids) and (self._strip or self._previous is None):
            self.push(prompt_ids[start])
            start += 1
        end = len(prompt_ids)
        while end > start and self._goes_with_what_precedes(prompt_ids[end - 1]):
            end -= 1
        for token_id in prompt_ids[max(start, end - 1) :]:
            self.push(token_id)
        if self._run and not self._run_spoilt:
            strip = self._strip
            self._shown = _Shown(self._strip_left(self._run_text()))
            self._strip = strip

    def _goes_with_what_precedes(self, token_id: int) -> bool:
        token = self._detokenizer.token(token_id, self._skip)
        return token is None or (self._chain.has_bytes and _BYTE_TOKEN.fullmatch(token) is not None)


class _WholeStream:
    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids)
        self._shown = _Shown(self._decode())

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return ""

    def finish(self) -> str:
        return self._shown.drop_from(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
