"""Stop strings: where a growing text must be cut, and which of its characters may be sent already."""

from collections.abc import Iterable


class StopMatcher:
    """The stop that completes first in the text wins; of two that complete at the same character, the longer.

    `push` returns the text that no stop can touch any more. What stays behind is the longest tail of the text that a
    stop begins with: nothing before it can ever belong to a match, so it is also all that has to be searched again.
    That bounds the work: a character enters the held text once and leaves it once.
    """

    def __init__(self, stops: Iterable[str], *, include_stop: bool) -> None:
        self.match: str | None = None  # the stop that ended the text
        self._stops = tuple(dict.fromkeys(stops))
        self._by_first: dict[str, list[str]] = {}
        for stop in self._stops:
            self._by_first.setdefault(stop[0], []).append(stop)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, looking: bool = True) -> str:
        """Takes the next piece of text. A stop that completes in a piece pushed while not looking doesn't count.

        After a match the text is over: the rest of the piece, and every later one, is dropped.
        """
        if not self._stops:
            return text
        if self.match is not None or not text:
            return ""
        known = len(self._held)
        text = self._held + text
        if looking:
            end = self._find(text, known)
            if self.match is not None:
                self._held = ""
                return text[:end] if self._include_stop else text[: end - len(self.match)]
        safe = self._safe(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """What was held back and, as nothing follows, is no stop."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, known: int) -> int:
        """Sets `match` to the stop that completes first beyond the known characters; returns where it ends."""
        best = len(text)
        for stop in self._stops:
            at = text.find(stop, max(0, known + 1 - len(stop)), best)
            if at < 0:
                continue
            end = at + len(stop)
            if self.match is None or end < best or len(stop) > len(self.match):
                best, self.match = end, stop
        return best

    def _safe(self, text: str) -> int:
        """How many characters stand before the longest tail that a stop begins with, and goes on."""
        for i, character in enumerate(text):
            stops = self._by_first.get(character)
            if stops is not None:
                tail = text[i:]
                if any(stop.startswith(tail) and len(stop) > len(tail) for stop in stops):
                    return i
        return len(text)
