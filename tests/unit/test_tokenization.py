"""What a caller of one tokenizer is promised; `tests/property/test_tokenization.py` has the general promises."""

import concurrent.futures
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from llm.exceptions import InvalidRequest, ModelRefused
from llm.sequence import SamplingParams
from llm.tokenization import IncrementalDecoder, Tokenization
from tests.unit.tokenizers_for_tests import byte_level, byte_level_with_bos, every_kind, sentencepiece, wordpiece

if TYPE_CHECKING:
    from _typeshed import TraceFunction


@pytest.fixture(scope="module")
def known() -> Tokenization:
    return Tokenization(byte_level())


@pytest.fixture(scope="module")
def llama() -> Tokenization:
    return Tokenization(sentencepiece())


def ids(tokenization: Tokenization, *tokens: str) -> list[int]:
    vocabulary = {tokenization.token(i): i for i in range(tokenization.vocab_size)}
    return [vocabulary[token] for token in tokens]


def run(decoder: IncrementalDecoder, output: list[int]) -> list[str]:
    return [*(decoder.push(token_id) for token_id in output), decoder.finish()]


def test_an_emoji_of_several_tokens_arrives_whole_and_at_once(known: Tokenization) -> None:
    output = known.encode("a🫠b", add_special_tokens=False)
    assert len(output) == 5
    assert run(IncrementalDecoder(known, [], SamplingParams()), output) == ["a", "", "", "🫠", "b", ""]


def test_bytes_that_never_become_a_character_are_sent_as_soon_as_that_is_certain(known: Tokenization) -> None:
    first, second = known.encode("🫠", add_special_tokens=False)[:2]
    letter = known.encode("b", add_special_tokens=False)[0]
    pieces = run(IncrementalDecoder(known, [], SamplingParams()), [first, second, letter, first])
    assert pieces == ["", "", "\ufffdb", "", "\ufffd"]


def test_half_of_a_surrogate_pair_is_certain_before_its_third_byte(known: Tokenization) -> None:
    half = ids(known, "í", "ł")  # bytes ED A0
    assert run(IncrementalDecoder(known, [], SamplingParams()), half) == ["", "\ufffd\ufffd", ""]


def test_a_byte_fallback_character_arrives_when_its_run_ends_or_is_spoilt(llama: Tokenization) -> None:
    e_acute = ids(llama, "<0xC3>", "<0xA9>")
    (a,), (bad,) = ids(llama, "a"), ids(llama, "<0xFF>")
    assert run(IncrementalDecoder(llama, ids(llama, "x"), SamplingParams()), [*e_acute, a]) == ["", "", "éa", ""]
    pieces = run(IncrementalDecoder(llama, ids(llama, "x"), SamplingParams()), [*e_acute, bad, bad, a])
    assert pieces == ["", "", "\ufffd\ufffd\ufffd", "\ufffd", "a", ""]


@pytest.mark.parametrize("prompt", ["x", "", " x "])
@pytest.mark.parametrize("kind", [byte_level, byte_level_with_bos, sentencepiece])
def test_spaces_survive_in_front_and_between(kind: type, prompt: str) -> None:
    known = Tokenization(kind())
    for text in (" a", "\n", "    "):
        token_ids = known.encode(text, add_special_tokens=False) * 5
        prompt_ids = known.encode(prompt, add_special_tokens=True)
        right = known.decode(prompt_ids + token_ids, skip_special_tokens=True)
        before = known.decode(prompt_ids, skip_special_tokens=True)
        assert before + "".join(run(IncrementalDecoder(known, prompt_ids, SamplingParams()), token_ids)) == right


def test_the_first_space_behind_a_prompt_belongs_to_the_text(llama: Tokenization) -> None:
    behind = IncrementalDecoder(llama, llama.encode("x", add_special_tokens=True), SamplingParams())
    alone = IncrementalDecoder(llama, llama.encode("", add_special_tokens=True), SamplingParams())
    assert behind.push(*ids(llama, "▁a")) == " a"
    assert alone.push(*ids(llama, "▁a")) == "a"  # as this tokenizer decodes a text's first token


def test_a_character_begun_in_the_prompt_is_completed_in_the_output(known: Tokenization) -> None:
    token_ids = known.encode("🫠", add_special_tokens=False)
    assert run(IncrementalDecoder(known, token_ids[:2], SamplingParams()), token_ids[2:]) == ["🫠", ""]
    assert run(IncrementalDecoder(known, token_ids[:1], SamplingParams()), token_ids[1:2]) == ["", ""]


def test_special_tokens_are_skipped_or_kept_and_ids_without_text_are_nothing(known: Tokenization) -> None:
    output = [*ids(known, "a", "<eos>", "b"), known.vocab_size + 7]
    assert run(IncrementalDecoder(known, [], SamplingParams()), output) == ["a", "", "b", "", ""]
    kept = IncrementalDecoder(known, [], SamplingParams(skip_special_tokens=False))
    assert run(kept, output) == ["a", "<eos>", "b", "", ""]
    assert known.token(known.vocab_size + 7) is None


def test_a_stop_string_ends_the_text_in_the_middle_of_a_token(known: Tokenization) -> None:
    output = known.encode("one the quick", add_special_tokens=False)
    decoder = IncrementalDecoder(known, [], SamplingParams(stop=("e th",)))
    sent, used = "", 0
    while decoder.stop_match is None:
        sent += decoder.push(output[used])
        used += 1
    assert (sent, decoder.stop_match) == ("on", "e th")
    assert "e th" in known.decode(output[:used], skip_special_tokens=True)
    assert "e th" not in known.decode(output[: used - 1], skip_special_tokens=True)


def test_a_stop_string_within_min_tokens_does_not_count(known: Tokenization) -> None:
    output = [*ids(known, "a", "b"), *ids(known, "a", "b")]
    decoder = IncrementalDecoder(known, [], SamplingParams(stop=("ab",), min_tokens=2))
    assert [decoder.push(token_id) for token_id in output[:3]] == ["", "ab", ""]
    assert decoder.stop_match is None
    assert decoder.push(output[3]) == ""
    late = IncrementalDecoder(known, [], SamplingParams(stop=("ab",), min_tokens=1))
    assert [late.push(token_id) for token_id in output[:2]] == ["", ""]  # begun within, completed after
    assert [decoder.stop_match, late.stop_match] == ["ab", "ab"]


def test_what_was_held_back_is_released_at_the_last_token(known: Tokenization) -> None:
    decoder = IncrementalDecoder(known, [], SamplingParams(stop=("abc",)))
    first = known.encode("🫠", add_special_tokens=False)[0]
    a, b = ids(known, "a", "b")
    assert [decoder.push(a), decoder.push(b)] == ["", ""]
    assert decoder.push(first, last=True) == "ab\ufffd"
    assert (decoder.finish(), decoder.stop_match) == ("", None)


def test_a_stop_completed_by_the_last_characters_counts(known: Tokenization) -> None:
    decoder = IncrementalDecoder(known, [], SamplingParams(stop=("a\ufffd",)))
    first = known.encode("🫠", add_special_tokens=False)[0]
    assert (decoder.push(*ids(known, "a")), decoder.push(first, last=True)) == ("", "")
    assert decoder.stop_match == "a\ufffd"


def test_the_end_tokens_text_is_left_out_unless_asked_for(known: Tokenization) -> None:
    a, end = ids(known, "a", "<tool call>")
    plain = IncrementalDecoder(known, [], SamplingParams(stop=("ab",)))
    assert plain.push(a) + plain.push_end_token(end) == "a"
    asked = IncrementalDecoder(known, [], SamplingParams(stop=("ab",), include_stop_str_in_output=True))
    assert asked.push(a) + asked.push_end_token(end) == "a<tool call>"


def test_a_stop_string_is_kept_with_include(known: Tokenization) -> None:
    decoder = IncrementalDecoder(known, [], SamplingParams(stop=("ab",), include_stop_str_in_output=True))
    assert "".join(decoder.push(token_id) for token_id in ids(known, "c", "a", "b")) == "cab"


def test_a_decoder_that_no_piece_is_certain_of_gives_the_whole_at_the_end() -> None:
    known = Tokenization(every_kind()["ctc"])
    decoder = IncrementalDecoder(known, [], SamplingParams(stop=("xb",)))
    assert [decoder.push(token_id) for token_id in ids(known, "c", "c", "x")] == ["", "", ""]
    assert decoder.push(*ids(known, "b"), last=True) == "c"
    assert decoder.stop_match == "xb"


def test_the_empty_prompt_is_what_the_tokenizer_makes_of_it() -> None:
    assert Tokenization(byte_level()).empty_ids == ()
    assert Tokenization(byte_level_with_bos()).empty_ids == (1,)


def test_special_tokens_are_added_only_where_asked_for() -> None:
    known = Tokenization(byte_level_with_bos())
    plain = known.encode("a b", add_special_tokens=False)
    assert known.encode("a b", add_special_tokens=True) == [1, *plain]
    assert known.special_ids == {0, 1, 2}


def test_bad_words_are_spelled_with_and_without_a_space(known: Tokenization) -> None:
    spelled = [tuple(known.encode(text, add_special_tokens=False)) for text in ("fox", " fox", "🙂", " 🙂")]
    assert known.bad_word_ids(("fox", " fox", "🙂")) == tuple(spelled)
    assert known.bad_word_ids((" ",))[0] == tuple(known.encode(" ", add_special_tokens=False))


def test_a_bad_word_without_tokens_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Tokenization(wordpiece()).bad_word_ids(("the", " "))
    assert refusal.value.param == "bad_words[1]"


def test_truncation_and_padding_in_the_file_have_no_effect(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    known = Tokenization.load(tmp_path)
    for text in ("the", "the lazy dog " * 20):
        assert known.encode(text, add_special_tokens=True) == byte_level().encode(text).ids


def test_a_folder_without_a_readable_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="has no tokenizer"):
        Tokenization.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelRefused, match="can't be read"):
        Tokenization.load(tmp_path)


def test_many_threads_get_what_each_would_get_alone(known: Tokenization) -> None:
    texts = [f"émigré {i} 🙂 " * (i % 37 + 1) for i in range(300)]
    alone = [known.encode(text, add_special_tokens=True) for text in texts]

    def both_ways(text: str) -> tuple[list[int], str]:
        token_ids = known.encode(text, add_special_tokens=True)
        return token_ids, known.decode(token_ids, skip_special_tokens=True)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for text, right, (token_ids, decoded) in zip(texts, alone, pool.map(both_ways, texts), strict=True):
            assert (token_ids, decoded) == (right, text)


def test_a_long_text_is_tokenized_without_stopping_other_threads(known: Tokenization) -> None:
    """The longest gap that another thread sees is a part of the time the tokenizing takes."""
    done = threading.Event()
    gaps: list[float] = []

    def watch() -> None:
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    known.encode("the quick brown fox " * 100_000, add_special_tokens=True)
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    assert max(gaps) < seconds / 2


def test_pushing_a_token_costs_the_same_at_the_end_of_a_long_text(known: Tokenization) -> None:
    """Counted in steps of the interpreter, not in time: the same tokens take the same steps late as early."""
    output = known.encode("The quick émigré 🙂 fox\n", add_special_tokens=False)

    def steps(before: int) -> int:
        decoder = IncrementalDecoder(known, output, SamplingParams(stop=("<|end|>", "\n\n")))
        for _ in range(before):
            run_once(decoder)
        count = 0

        def count_lines(_frame: FrameType, _event: str, _argument: Any) -> "TraceFunction":
            nonlocal count
            count += 1
            return count_lines

        previous = sys.gettrace()
        sys.settrace(count_lines)
        try:
            run_once(decoder)
        finally:
            sys.settrace(previous)
        return count

    def run_once(decoder: IncrementalDecoder) -> None:
        for token_id in output:
            decoder.push(token_id)

    assert steps(1) == steps(500)
