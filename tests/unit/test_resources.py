"""CPUs and memory are counted from what the container may use, not from the machine that it runs on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resources import cpu_budget, memory_limit

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


@pytest.fixture(autouse=True)
def sixty_four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def machine(root: Path, *, mounts: list[str], groups: list[str], files: dict[str, str], memory: int = 256 * GIB) -> Path:
    """A file tree with /proc and control groups; `files` are paths under sys/fs/cgroup."""
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:       {memory // 1024} kB\nMemFree:        1024 kB\n")
    (proc / "self/mountinfo").write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n" + "".join(f"{m}\n" for m in mounts)
    )
    (proc / "self/cgroup").write_text("".join(f"{group}\n" for group in groups))
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def v2(root: Path, files: dict[str, str], *, group: str = "/", top: str = "/", memory: int = 256 * GIB) -> Path:
    mount = f"30 22 0:26 {top} /sys/fs/cgroup ro,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate"
    return machine(root, mounts=[mount], groups=[f"0::{group}"], files=files, memory=memory)


def v1(root: Path, files: dict[str, str], *, group: str = "/", top: str = "/") -> Path:
    mounts = [
        f"33 31 0:30 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:10 - cgroup cgroup rw,cpu,cpuacct",
        f"35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory",
        f"36 31 0:33 {top} /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset",
        "37 31 0:34 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw",
    ]
    groups = [f"7:memory:{group}", f"4:cpu,cpuacct:{group}", f"3:cpuset:{group}", "0::/"]
    return machine(root, mounts=mounts, groups=groups, files=files)


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("max 100000", 64),
        ("400000 100000", 4),
        ("765000 100000", 7),
        ("50000 100000", 1),
        ("9000000 100000", 64),
        ("20000 10000", 2),
    ],
)
def test_the_quota_of_version_2_is_rounded_down_but_never_to_nothing(tmp_path: Path, quota: str, cpus: int) -> None:
    assert cpu_budget(v2(tmp_path, {"cpu.max": quota})) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("-1", 64), ("400000", 4), ("765000", 7), ("50000", 1)])
def test_the_quota_of_version_1_is_read_as_well(tmp_path: Path, quota: str, cpus: int) -> None:
    files = {"cpu,cpuacct/cpu.cfs_quota_us": quota, "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    assert cpu_budget(v1(tmp_path, files)) == cpus


@pytest.mark.parametrize("lowest", ["kube/cpu.max", "kube/pod/cpu.max", "kube/pod/box/cpu.max"])
def test_a_parent_with_less_binds_its_children(tmp_path: Path, lowest: str) -> None:
    quotas = dict.fromkeys(("kube/cpu.max", "kube/pod/cpu.max", "kube/pod/box/cpu.max"), "800000 100000")
    assert cpu_budget(v2(tmp_path, quotas | {lowest: "300000 100000"}, group="/kube/pod/box")) == 3


def test_a_parent_with_less_binds_its_children_in_version_1(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/pod/cpu.cfs_quota_us": "200000",
        "cpu,cpuacct/pod/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/pod/box/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/pod/box/cpu.cfs_period_us": "100000",
        "memory/pod/memory.limit_in_bytes": str(6 * GIB),
        "memory/pod/box/memory.limit_in_bytes": "9223372036854771712",
    }
    root = v1(tmp_path, files, group="/pod/box")
    assert (cpu_budget(root), memory_limit(root)) == (2, 6 * GIB)


def test_a_neighbour_group_does_not_count(tmp_path: Path) -> None:
    files = {
        "mine/cpu.max": "400000 100000",
        "other/cpu.max": "100000 100000",
        "mine/memory.max": "max",
        "other/memory.max": "1",
    }
    root = v2(tmp_path, files, group="/mine")
    assert (cpu_budget(root), memory_limit(root)) == (4, 256 * GIB)


@pytest.mark.parametrize(
    ("group", "top"),
    [
        ("/docker/ab12", "/docker/ab12"),
        ("/../../elsewhere", "/"),
        ("/elsewhere", "/docker/ab12"),
        ("/docker/ab12/../x", "/docker/ab12"),
    ],
)
def test_in_a_container_its_own_group_lies_at_the_mount_point(tmp_path: Path, group: str, top: str) -> None:
    files = {"cpu.max": "300000 100000", "memory.max": str(2 * GIB)}
    root = v2(tmp_path, files, group=group, top=top)
    assert (cpu_budget(root), memory_limit(root)) == (3, 2 * GIB)


def test_a_mount_point_with_a_space_is_found(tmp_path: Path) -> None:
    mount = r"30 22 0:26 / /sys/fs/cgroup/my\040groups rw - cgroup2 cgroup2 rw"
    root = machine(tmp_path, mounts=[mount], groups=["0::/"], files={"my groups/cpu.max": "500000 100000"})
    assert cpu_budget(root) == 5


def test_affinity_counts_where_it_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 9})
    assert cpu_budget(v2(tmp_path, {"cpu.max": "max 100000"})) == 3


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, mounts=[], groups=[], files={}, memory=8 * GIB)
    assert (cpu_budget(root), memory_limit(root)) == (64, 8 * GIB)


def test_without_proc_the_system_is_asked(tmp_path: Path) -> None:
    assert cpu_budget(tmp_path) == 64
    assert memory_limit(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("limit", "right"), [("max", 256 * GIB), (str(3 * GIB), 3 * GIB), (str(999 * GIB), 256 * GIB)])
def test_memory_is_the_smaller_of_the_limit_and_the_machine(tmp_path: Path, limit: str, right: int) -> None:
    assert memory_limit(v2(tmp_path, {"memory.max": limit})) == right


def test_a_parent_with_less_memory_binds_its_children(tmp_path: Path) -> None:
    files = {"pod/memory.max": str(4 * GIB), "pod/box/memory.max": str(7 * GIB)}
    assert memory_limit(v2(tmp_path, files, group="/pod/box")) == 4 * GIB


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_a_process_that_is_bound_to_one_core_counts_one() -> None:
    script = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); import resources; print(resources.cpu_budget())"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout == "1\n"
