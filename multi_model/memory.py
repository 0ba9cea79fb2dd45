"""What a process takes: its private bytes, and the weights that it maps, each file once.

Private are the pages that nobody else has: those that it shares with the forkserver are the forkserver's. A mapped file of
weights counts in full, whether its pages have been read or not, and once, however many processes map it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ \S+ (\d+)\s*(.*)$")  # … inode path (man 5 proc)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True, slots=True)
class Footprint:
    private: int = 0  # bytes
    files: dict[str, int] = field(default_factory=dict)  # mapped weights -> bytes

    @property
    def total(self) -> int:
        return self.private + sum(self.files.values())


def footprint(pids: Iterable[int], root: Path = Path("/")) -> Footprint:
    """Of several processes together. One that has ended takes nothing. `root` holds `proc`."""
    private, files = 0, dict[str, int]()
    for pid in pids:
        try:
            text = (root / f"proc/{pid}/smaps").read_text(errors="replace")
        except OSError:
            continue
        path = ""
        for line in text.splitlines():
            head = _HEAD.match(line)
            if head is not None:
                path = head[2] if head[2].endswith(_WEIGHTS) else ""
                if path:
                    files[path] = _size(root, path)
            elif line.startswith("Private_") and not path:
                private += int(line.split()[1]) * 1024
    return Footprint(private, files)


def proportional_bytes(pids: Iterable[int], root: Path = Path("/")) -> int:
    """PSS: what is shared is divided among those who share it. So the sum over all processes is what they take together."""
    total = 0
    for pid in pids:
        try:
            text = (root / f"proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def _size(root: Path, path: str) -> int:
    try:
        return (root / path.lstrip("/")).stat().st_size
    except OSError:
        return 0  # deleted meanwhile
