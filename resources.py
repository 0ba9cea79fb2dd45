"""How many CPUs and how much memory this process may use: the machine's, or less where a control group says so."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_Reader = Callable[[Path], int | None]


def cpu_budget(root: Path = Path("/")) -> int:
    """CPUs that this process may keep busy: the smaller of its affinity and its group's quota rounded down, at least 1.

    A group is bound by its parents too, so the lowest quota up to the mount point counts. With more threads the kernel stops
    the whole group within each period, and threads that meet at a barrier wait for the stopped ones. `root` has `proc`.
    """
    return max(1, min([_affinity(), *_limits(root, "cpu", {1: _quota_v1, 2: _quota_v2})]))


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process may use: the smallest of the machine's memory and the limits on its group and the parents.

    Version 1 writes "no limit" as a number near 2**63, which the machine's memory is always below. `root` holds `proc`.
    """
    return min([_machine_memory(root), *_limits(root, "memory", {1: _bytes_v1, 2: _bytes_v2})])


@dataclass(frozen=True, slots=True)
class _Mount:
    """A hierarchy of control groups; version 2 has every controller in one hierarchy and names none of them."""

    point: Path
    top: PurePosixPath  # the group seen at `point`; not "/" in a container that shares the host's group namespace
    version: int
    controllers: frozenset[str]  # of version 1, beside other mount options


def _limits(root: Path, controller: str, readers: dict[int, _Reader]) -> Iterator[int]:
    for mount in _mounts(root):
        for controllers, group in _memberships(root):
            if controller in controllers & mount.controllers or (mount.version == 2 and not controllers):
                for folder in _upwards(mount, group):
                    limit = readers[mount.version](folder)
                    if limit is not None:
                        yield limit


def _mounts(root: Path) -> Iterator[_Mount]:
    """Lines like `35 31 0:32 /top /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory` (man 5 proc)."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split(" ")
        if kind in ("cgroup", "cgroup2"):
            top, point = (_unescaped(field) for field in before.split(" ")[3:5])
            version = 1 if kind == "cgroup" else 2
            yield _Mount(root / point.lstrip("/"), PurePosixPath(top), version, frozenset(options.split(",")))


def _memberships(root: Path) -> Iterator[tuple[frozenset[str], PurePosixPath]]:
    """Lines like `4:cpu,cpuacct:/group`, and `0::/group` for version 2 (man 7 cgroups)."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        yield frozenset(filter(None, controllers.split(","))), PurePosixPath(group)


def _upwards(mount: _Mount, group: PurePosixPath) -> Iterator[Path]:
    """Folders of a group and its parents as far as the mount shows them; a group outside of it is represented by the top."""
    inside = group.relative_to(mount.top) if group.is_relative_to(mount.top) else PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    yield mount.point / inside
    yield from (mount.point / parent for parent in inside.parents)


def _quota_v1(folder: Path) -> int | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota // period if quota is not None and quota > 0 and period else None


def _quota_v2(folder: Path) -> int | None:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    return int(quota) // int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _bytes_v1(folder: Path) -> int | None:
    return _number(folder / "memory.limit_in_bytes")


def _bytes_v2(folder: Path) -> int | None:
    return _number(folder / "memory.max")


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _machine_memory(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    """The file's text, or "" where there is no such file: not Linux, or a group without this controller."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
