"""Limits and counters on fake /proc and /sys trees that look like real machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from training_xpu.device import cgroups

GIB = 1 << 30
UNLIMITED_V1 = "9223372036854771712"  # what version 1 prints for "no limit" with 4 KiB pages
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def v1_mount(controller: str, shown: str = "/") -> str:
    return f"35 31 0:32 {shown} /sys/fs/cgroup/{controller} rw,relatime - cgroup cgroup rw,{controller}"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def test_version_2_smallest_memory_limit_on_the_way_up(tmp_path: Path) -> None:
    base = "/sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/user.slice/job.scope/rank",
            "/proc/self/mountinfo": V2_MOUNT,
            f"{base}/user.slice/memory.max": str(64 * GIB),
            f"{base}/user.slice/job.scope/memory.max": str(8 * GIB),
            f"{base}/user.slice/job.scope/rank/memory.max": "max",
        },
    )
    limit = cgroups.memory_limit(root)
    assert limit == cgroups.Limit(8 * GIB, f"{base}/user.slice/job.scope/memory.max")


def test_version_2_in_a_container_with_its_own_namespace(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/",
            "/proc/self/mountinfo": V2_MOUNT,
            "/sys/fs/cgroup/memory.max": str(4 * GIB),
            "/sys/fs/cgroup/cpu.max": "150000 100000",
            "/sys/fs/cgroup/cpuset.cpus.effective": "2-3",
            "/sys/fs/cgroup/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0",
        },
    )
    limit, quota = cgroups.memory_limit(root), cgroups.cpu_quota(root)
    assert limit is not None
    assert limit.value == 4 * GIB
    assert quota is not None
    assert quota.value == 1.5
    assert cgroups.cpuset(root) == {2, 3}
    assert cgroups.oom_kills(root) == cgroups.OomKills(2, "cgroup", "/sys/fs/cgroup/memory.events")


def test_version_2_group_outside_the_namespace_falls_back_to_the_mount_point(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/../../other",
            "/proc/self/mountinfo": V2_MOUNT,
            "/sys/fs/cgroup/memory.max": str(2 * GIB),
            "/sys/fs/cgroup/memory.events": "oom_kill 5",
            "/proc/vmstat": "nr_free_pages 1\noom_kill 9",
        },
    )
    limit = cgroups.memory_limit(root)
    assert limit is not None
    assert limit.value == 2 * GIB
    # The events of a group that may not be ours do not count.
    assert cgroups.oom_kills(root) == cgroups.OomKills(9, "machine", "/proc/vmstat")


def test_version_1_docker_without_cgroup_namespace(tmp_path: Path) -> None:
    name = "/docker/3f2a"
    root = tree(
        tmp_path,
        {
            "/proc/self/cgroup": f"4:memory:{name}\n2:cpu,cpuacct:{name}\n3:cpuset:{name}",
            "/proc/self/mountinfo": "\n".join(
                [
                    v1_mount("memory", name),
                    f"36 31 0:33 {name} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
                    v1_mount("cpuset", name),
                ]
            ),
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * GIB),
            "/sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "/sys/fs/cgroup/cpuset/cpuset.cpus": "0-1,4",
        },
    )
    limit, quota, kills = cgroups.memory_limit(root), cgroups.cpu_quota(root), cgroups.oom_kills(root)
    assert limit is not None
    assert limit.value == 3 * GIB
    assert quota is not None
    assert quota.value == 2.5
    assert cgroups.cpuset(root) == {0, 1, 4}
    assert kills is not None
    assert (kills.count, kills.scope) == (4, "cgroup")


def test_version_1_limit_of_an_invisible_parent(tmp_path: Path) -> None:
    """Kubernetes limits the pod; the container, whose own group is unlimited, sees only itself."""
    name = "/kubepods/burstable/pod1/container1"
    root = tree(
        tmp_path,
        {
            "/proc/self/cgroup": f"4:memory:{name}",
            "/proc/self/mountinfo": v1_mount("memory", name),
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
            "/sys/fs/cgroup/memory/memory.stat": f"cache 0\nhierarchical_memory_limit {5 * GIB}\ntotal_cache 0",
        },
    )
    limit = cgroups.memory_limit(root)
    assert limit == cgroups.Limit(5 * GIB, "/sys/fs/cgroup/memory/memory.stat")


def test_hybrid_takes_the_controller_from_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "9:name=systemd:/\n4:memory:/batch/job7\n1:cpu:/\n0::/session",
            "/proc/self/mountinfo": "\n".join(
                [
                    v1_mount("memory"),
                    v1_mount("cpu"),
                    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
                ]
            ),
            "/sys/fs/cgroup/memory/batch/memory.limit_in_bytes": str(10 * GIB),
            "/sys/fs/cgroup/memory/batch/job7/memory.limit_in_bytes": str(6 * GIB),
            "/sys/fs/cgroup/memory/batch/job7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1",
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "/sys/fs/cgroup/unified/cgroup.procs": "",
            "/proc/vmstat": "oom_kill 100",
        },
    )
    limit = cgroups.memory_limit(root)
    assert limit == cgroups.Limit(6 * GIB, "/sys/fs/cgroup/memory/batch/job7/memory.limit_in_bytes")
    assert cgroups.cpu_quota(root) is None
    assert cgroups.oom_kill_count(root) == 1


def test_use_leaves_reclaimable_page_cache_out(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/job",
            "/proc/self/mountinfo": V2_MOUNT,
            "/sys/fs/cgroup/job/memory.max": "1000000",
            "/sys/fs/cgroup/job/memory.current": "700000",
            "/sys/fs/cgroup/job/memory.stat": "anon 400000\ninactive_file 250000",
        },
    )
    assert cgroups.memory_use(root) == [(1000000, 450000)]


def test_without_mountinfo_the_usual_places_are_tried(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "/sys/fs/cgroup/cgroup.controllers": "cpu memory",
            "/sys/fs/cgroup/memory.max": "12345",
        },
    )
    limit = cgroups.memory_limit(root)
    assert limit is not None
    assert limit.value == 12345


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert cgroups.memory_limit(tmp_path) is None
    assert cgroups.memory_use(tmp_path) == []
    assert cgroups.cpu_quota(tmp_path) is None
    assert cgroups.cpuset(tmp_path) == frozenset()
    assert cgroups.oom_kills(tmp_path) is None
    assert cgroups.oom_kill_count(tmp_path) is None


@pytest.mark.parametrize("content", ["", "max", "nonsense", "-5", UNLIMITED_V1, "9223372036854775807"])
def test_what_is_no_limit_or_malformed_is_no_limit(tmp_path: Path, content: str) -> None:
    root = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "no colons here\n0::/job",
            "/proc/self/mountinfo": f"short line\n{V2_MOUNT}\n1 2 3 - cgroup2",
            "/sys/fs/cgroup/job/memory.max": content,
            "/sys/fs/cgroup/job/cpu.max": content,
            "/sys/fs/cgroup/job/cpuset.cpus.effective": content,
            "/sys/fs/cgroup/job/memory.events": content,
        },
    )
    assert cgroups.memory_limit(root) is None
    if content in ("", "max", "nonsense", "-5"):
        assert cgroups.cpu_quota(root) is None
    assert cgroups.oom_kill_count(root) is None


def test_mount_points_with_spaces(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "/proc/self/cgroup": "0::/",
            "/proc/self/mountinfo": "30 23 0:26 / /sys/fs/my\\040groups rw - cgroup2 cgroup2 rw",
            "/sys/fs/my groups/memory.max": "4096",
        },
    )
    limit = cgroups.memory_limit(root)
    assert limit == cgroups.Limit(4096, "/sys/fs/my groups/memory.max")


def test_this_machine_can_be_read() -> None:
    limit = cgroups.memory_limit()
    assert limit is None or limit.value > 0
    kills = cgroups.oom_kills()
    assert kills is None or kills.count >= 0
