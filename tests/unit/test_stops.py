"""Stop strings, one promise each; `tests/property/test_stops.py` has the general one."""

import time

import pytest

from llm.stops import StopMatcher


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include_stop=include)
    return [*(matcher.push(piece) for piece in pieces), matcher.finish()], matcher.match


def test_a_stop_over_several_pieces_is_found_and_no_part_of_it_sent() -> None:
    assert run(["one E", "N", "D two"], ["END"]) == (["one ", "", "", ""], "END")


def test_the_stop_is_kept_where_it_is_wanted_and_the_rest_dropped() -> None:
    assert run(["one E", "ND two"], ["END"], include=True) == (["one ", "END", ""], "END")


@pytest.mark.parametrize("stops", [["cd", "zz"], ["zz", "cd"], ["abcdef", "cd"], ["cd", "abcdef"]])
def test_the_stop_that_completes_first_wins_whatever_the_order(stops: list[str]) -> None:
    pieces, match = run(["abcdefzz"], stops)
    assert ("".join(pieces), match) == ("ab", "cd")


@pytest.mark.parametrize("stops", [["bcd", "d", "cd"], ["d", "cd", "bcd"]])
def test_of_two_that_complete_together_the_longer_wins(stops: list[str]) -> None:
    pieces, match = run(["ab", "c", "de"], stops)
    assert ("".join(pieces), match) == ("a", "bcd")


def test_a_false_start_is_released_as_soon_as_it_is_one() -> None:
    assert run(["a<", "|", "b", "<|"], ["<|end|>"])[0] == ["a", "", "<|b", "", "<|"]


def test_text_flows_when_no_stop_begins() -> None:
    assert run(["lively ", "stream"], ["a very long stop string"])[0] == ["lively ", "stream", ""]


def test_without_stops_nothing_is_touched() -> None:
    assert run(["a", "", "b"], []) == (["a", "", "b", ""], None)


def test_a_stop_completed_while_not_looking_is_ordinary_text() -> None:
    matcher = StopMatcher(["ab", "abc"], include_stop=False)
    assert matcher.push("xab", looking=False) == "x"
    assert matcher.push("d ab") == "abd "
    assert matcher.match == "ab"


def test_the_worst_stops_cost_little_and_no_more_as_the_text_grows() -> None:
    """64 stops of 1,024 characters that the text keeps almost completing."""
    stops = ["a" * 1000 + chr(0x4E00 + i) * 24 for i in range(64)]
    matcher = StopMatcher(stops, include_stop=False)
    seconds = []
    for _ in range(10):
        begin = time.thread_time()
        for _ in range(10):
            matcher.push("a" * 50)
        seconds.append(time.thread_time() - begin)
    assert matcher.match is None
    assert max(seconds[3:]) < 0.2  # 100 tokens' worth of text; a search of the whole would be far beyond
