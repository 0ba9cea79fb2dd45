"""However a text arrives, it is cut where a plain search of the whole text says."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from llm.stops import StopMatcher

CLOSE = st.text(alphabet="ab", min_size=1, max_size=6)  # few letters: overlaps, repeats, stops inside stops
ANY = st.text(min_size=1, max_size=4)


def plain_cut(text: str, stops: list[str], *, include: bool, exempt: int) -> tuple[str, str | None]:
    """The text as sent and the stop that ended it: every place of every stop, looked at one by one."""
    places = [
        (start + len(stop), -len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > exempt
    ]
    if not places:
        return text, None
    end, _, stop = min(places)
    return text[:end] if include else text[: end - len(stop)], stop


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=1500, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=40) | st.text(max_size=20),
    stops=st.lists(CLOSE | ANY, max_size=5),
    cuts=st.lists(st.integers(0, 40), max_size=12),
    include=st.booleans(),
    exempt_pieces=st.integers(0, 4),
)
def test_any_chunking_cuts_where_the_whole_text_says(
    text: str, stops: list[str], cuts: list[int], include: bool, exempt_pieces: int
) -> None:
    pieces = pieces_of(text, cuts)
    exempt = len("".join(pieces[:exempt_pieces]))
    right, match = plain_cut(text, stops, include=include, exempt=exempt)
    for order in (stops, stops[::-1]):
        matcher = StopMatcher(order, include_stop=include)
        sent = ""
        for i, piece in enumerate(pieces):
            sent += matcher.push(piece, looking=i >= exempt_pieces)
            assert right.startswith(sent)  # nothing of a stop, nothing behind it
        assert sent + matcher.finish() == right
        assert matcher.match == match


@settings(max_examples=500, deadline=None)
@given(text=st.text(alphabet="abc", max_size=30), stops=st.lists(CLOSE, min_size=1, max_size=4))
def test_only_what_a_stop_begins_with_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, include_stop=False)
    sent = ""
    for i, character in enumerate(text):
        sent += matcher.push(character)
        if matcher.match is not None:
            return
        held = text[len(sent) : i + 1]
        longest = next((text[k : i + 1] for k in range(i + 1) if any(s.startswith(text[k : i + 1]) for s in stops)), "")
        assert held == longest
