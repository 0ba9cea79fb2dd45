"""Whatever tokens a model emits, the streamed text is the tokenizer's own decoding of the whole."""

import functools
import os.path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.sequence import SamplingParams
from llm.tokenization import IncrementalDecoder, Tokenization
from tests.unit.tokenizers_for_tests import SPECIALS, byte_level, byte_level_lossy, every_kind, sentencepiece

KINDS = tuple(every_kind())
HARD_BYTES = [
    b"\xf0\x9f\xab\xa0",  # an emoji
    b"\xf0\x9f",  # cut off
    b"\xe9\xbe\x9c",
    b"\xc0\xaf",  # overlong
    b"\xe0\x80\xaf",
    b"\xed\xa0\x80",  # half of a surrogate pair
    b"\xf4\x90\x80\x80",  # beyond Unicode
    b"\xff",
    b"\x80\x80",
    b"\xef\xbf\xbd",  # U+FFFD itself
    b"a",
    b" ",
    b"\n",
]
# For the count: composes four to one, is dropped, is swallowed, is one token, is many.
AWKWARD = [
    "\u03b1\u0313\u0300\u0345" * 20,
    "\x04\x06" * 20,
    "<end>" + " " * 40,
    "<tool call>",
    "🫠",
    "ab",
    "\u1100\u1161\u11a8",
]


@functools.cache
def tokenization(kind: str) -> Tokenization:
    return Tokenization(every_kind()[kind])


def streamed(
    tokenization: Tokenization, prompt: list[int], output: list[int], params: SamplingParams, *, by_length: bool = False
) -> list[str]:
    decoder = IncrementalDecoder(tokenization, prompt, params)
    pieces = [decoder.push(token_id, last=by_length and i == len(output) - 1) for i, token_id in enumerate(output)]
    return [*pieces, decoder.finish()]


def whole(tokenization: Tokenization, prompt: list[int], output: list[int], *, skip: bool) -> str:
    before = tokenization.decode(prompt, skip_special_tokens=skip)
    after = tokenization.decode(prompt + output, skip_special_tokens=skip)
    return after[len(os.path.commonprefix([before, after])) :]  # noqa: RUF071 these are texts


def check(tokenization: Tokenization, prompt: list[int], output: list[int], *, skip: bool) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    pieces = streamed(tokenization, prompt, output, params)
    right = whole(tokenization, prompt, output, skip=skip)
    assert "".join(pieces) == right
    assert "".join(streamed(tokenization, prompt, output, params, by_length=True)) == right
    for piece in pieces:
        piece.encode()  # whole characters


def check_nothing_is_kept_back(known: Tokenization, output: list[int], *, skip: bool) -> None:
    """Byte-level text isn't kept back: what has been sent is the text so far, short of one incomplete character."""
    decoder = IncrementalDecoder(known, [], SamplingParams(skip_special_tokens=skip))
    sent = ""
    for i, token_id in enumerate(output):
        sent += decoder.push(token_id)
        assert known.decode(output[: i + 1], skip_special_tokens=skip) in {sent, sent + "\ufffd"}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_decoded_whole(kind: str, data: st.DataObject, skip: bool) -> None:
    known = tokenization(kind)
    ids = st.integers(0, known.vocab_size + 3)
    prompt = data.draw(st.lists(ids, max_size=8))
    output = data.draw(st.lists(ids, max_size=24))
    check(known, prompt, output, skip=skip)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_broken_utf8_decodes_as_the_whole_does(kind: str, data: st.DataObject, skip: bool) -> None:
    """Bytes that almost are characters, cut anywhere between prompt and output, with specials and gaps inside."""
    known = tokenization(kind)
    vocabulary = {known.token(i): i for i in range(known.vocab_size)}
    spelled = byte_ids(known)
    units = [[spelled[byte] for byte in hard] for hard in HARD_BYTES]
    units += [[vocabulary[name]] for name in SPECIALS] + [[known.vocab_size + 1]]
    drawn = data.draw(st.lists(st.sampled_from(units), max_size=14))
    ids = [token_id for unit in drawn for token_id in unit]
    cut = data.draw(st.integers(0, len(ids)))
    check(known, ids[:cut], ids[cut:], skip=skip)
    if kind == "byte-level":
        check_nothing_is_kept_back(known, ids, skip=skip)


@functools.cache
def byte_ids(known: Tokenization) -> list[int]:
    """The token of each byte."""
    vocabulary = {known.token(i): i for i in range(known.vocab_size)}
    if "<0x00>" in vocabulary:
        return [vocabulary[f"<0x{byte:02X}>"] for byte in range(256)]
    spelled: dict[bytes, int] = {}
    for token, token_id in vocabulary.items():
        unit = known.detokenizer.unit(token_id, skip_special_tokens=False)
        if token is not None and len(token) == 1 and unit is not None:
            spelled[unit] = token_id
    return [spelled[bytes([byte])] for byte in range(256)]


@settings(max_examples=200, deadline=None)
@given(prompt=st.text(max_size=12), output=st.text(max_size=30), by_bytes=st.booleans())
def test_a_text_arrives_as_it_is_and_never_with_a_replacement_mark(prompt: str, output: str, by_bytes: bool) -> None:
    known = tokenization("byte-level")
    if by_bytes:
        spelled = byte_ids(known)
        before, after = ([spelled[byte] for byte in text.encode()] for text in (prompt, output))
    else:
        before, after = (known.encode(text, add_special_tokens=False) for text in (prompt, output))
    if "naï" in prompt + output:
        return  # the added token with a byte of its own
    pieces = streamed(known, before, after, SamplingParams())
    assert "".join(pieces) == output
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in output


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["byte-level", "llama", "wordpiece"])
def test_stop_strings_cut_the_decoded_whole(kind: str, data: st.DataObject) -> None:
    """The text up to the earliest stop, found at the token that completes it; nothing of the stop is ever sent."""
    known = tokenization(kind)
    ids = st.integers(0, known.vocab_size - 1)
    prompt = data.draw(st.lists(ids, max_size=4))
    output = data.draw(st.lists(ids, min_size=2, max_size=24))
    text = whole(known, prompt, output, skip=True)
    if len(text) < 2:
        return
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    decoder = IncrementalDecoder(known, prompt, SamplingParams(stop=(stop,)))
    sent = ""
    for token_id in output:
        sent += decoder.push(token_id)
        if decoder.stop_match is not None:
            break
    sent += decoder.finish()
    assert decoder.stop_match == stop
    assert sent == text[: text.index(stop)]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200) | st.lists(st.sampled_from(AWKWARD), max_size=30).map("".join))
@pytest.mark.parametrize("kind", KINDS)
def test_the_lower_bound_of_the_token_count_holds(kind: str, text: str) -> None:
    known = tokenization(kind)
    assert known.fewest_tokens(text) <= len(known.encode(text, add_special_tokens=True))


def test_the_bound_is_there_for_the_common_tokenizers() -> None:
    for tokenizer in (byte_level(), byte_level_lossy(), sentencepiece()):
        known = Tokenization(tokenizer)
        assert known.fewest_tokens("a" * 10**6) == -(-(10**6) // known.longest_token)
