"""Limits and counters of control groups: version 1, version 2 and both at once, in and out of containers.

What a process may use is the smallest limit on the way from its own group to the root of the hierarchy; a container
often sees only a part of that way. /proc/self/cgroup names the group, /proc/self/mountinfo says which part of the
hierarchy is mounted where (see cgroups(7), cgroup_namespaces(7) and proc(5)).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from training_xpu.device.files import ROOT, as_int, at, parse_cpu_list, read_fields, read_int, read_text

# Version 1 writes "no limit" as the largest multiple of the page size below 2^63; no machine has 2^60 bytes.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Limit:
    """A limit and the file that sets it."""

    value: float
    source: str


@dataclass(frozen=True)
class OomKills:
    """How many processes the kernel's out-of-memory killer has ended.

    scope "cgroup": only processes of this process's group (version 2: and the groups below it) are counted, so a rise
    while a rank of ours died by SIGKILL names the cause. scope "machine": every process of the machine is counted, so
    a rise is a strong hint only.
    """

    count: int
    scope: Literal["cgroup", "machine"]
    source: str


@dataclass(frozen=True)
class _Mount:
    point: str  # where it is mounted
    root: str  # which folder of the hierarchy is mounted there
    version: int
    controllers: frozenset[str]  # version 1 only


def memory_limit(root: Path = ROOT) -> Limit | None:
    """The smallest memory limit in bytes that holds for this process, None when there is none."""
    limits: list[Limit] = []
    for group in _groups("memory", root):
        if group.version == 2:
            limits += _limits(group.path, "memory.max", root)
        else:
            limits += _limits(group.path, "memory.limit_in_bytes", root)
            # Holds the smallest limit of the parents as well, also of those a container cannot see.
            inherited = as_int(read_fields(group.path / "memory.stat").get("hierarchical_memory_limit"))
            if inherited is not None and 0 < inherited < _NO_LIMIT:
                limits.append(Limit(inherited, _shown(group.path / "memory.stat", root)))
    return min(limits, key=lambda limit: limit.value, default=None)


def memory_use(root: Path = ROOT) -> list[tuple[int, int]]:
    """(limit, use) in bytes of each limited group on the way up; page cache that can be given back is not use."""
    pairs = []
    for group in _groups("memory", root):
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if group.version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, use = read_int(group.path / names[0]), read_int(group.path / names[1])
        if limit is not None and use is not None and 0 <= limit < _NO_LIMIT:
            cache = as_int(read_fields(group.path / "memory.stat").get(names[2])) or 0
            pairs.append((limit, max(0, use - cache)))
    return pairs


def cpu_quota(root: Path = ROOT) -> Limit | None:
    """The smallest CPU quota that holds for this process, in cores (1.5: 150 ms of CPU per 100 ms), None for none."""
    quotas: list[Limit] = []
    for group in _groups("cpu", root):
        if group.version == 2:
            source = group.path / "cpu.max"
            quota_text, _, period_text = (read_text(source) or "").partition(" ")
            quota, period = as_int(quota_text), as_int(period_text or "100000")
        else:
            source = group.path / "cpu.cfs_quota_us"
            quota, period = read_int(source), read_int(group.path / "cpu.cfs_period_us")
        if quota is not None and period is not None and quota > 0 and period > 0:
            quotas.append(Limit(quota / period, _shown(source, root)))
    return min(quotas, key=lambda limit: limit.value, default=None)


def cpuset(root: Path = ROOT) -> frozenset[int]:
    """The CPUs this process's group may use; empty when no group says so."""
    for group in _groups("cpuset", root):  # the nearest group decides: the kernel has intersected it with its parents
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            cpus = parse_cpu_list(read_text(group.path / name))
            if cpus:
                return cpus
    return frozenset()


def oom_kills(root: Path = ROOT) -> OomKills | None:
    """The most specific counter of out-of-memory kills that can be read, None when the kernel has none (before 4.13).

    Order: memory.events of version 2 (the group and those below it), memory.events.local, memory.oom_control of
    version 1 (exactly this group), then oom_kill of /proc/vmstat for the whole machine. Of each hierarchy only the
    group the process is in counts: a group above it would mix in strangers. The counter of a victim's own group rises
    whichever limit, of the group, of a parent or of the machine, was hit.
    """
    for group in _groups("memory", root, parents=False):
        names = ("memory.events", "memory.events.local") if group.version == 2 else ("memory.oom_control",)
        for name in names:
            count = as_int(read_fields(group.path / name).get("oom_kill"))
            if count is not None and group.own:
                return OomKills(count, "cgroup", _shown(group.path / name, root))
    count = as_int(read_fields(at(root, "/proc/vmstat")).get("oom_kill"))
    return None if count is None else OomKills(count, "machine", "/proc/vmstat")


def oom_kill_count(root: Path = ROOT) -> int | None:
    """The count of `oom_kills`: compare it before a job and after one of its ranks died by SIGKILL."""
    kills = oom_kills(root)
    return None if kills is None else kills.count


@dataclass(frozen=True)
class _Group:
    path: Path
    version: int
    own: bool  # the very group this process is in, not one above it


def _groups(controller: str, root: Path, parents: bool = True) -> Iterator[_Group]:
    """The groups of this process that may hold the controller's files, from its own one up to the mount point."""
    own = _own_groups(root)
    for mount in _mounts(root):
        if mount.version == 1 and controller not in mount.controllers:
            continue
        own_path = own.get(controller if mount.version == 1 else "")
        point = at(root, mount.point)
        below = _below(own_path, mount.root)
        named = path = point / (below or ".")
        while path != point and not path.is_dir():
            path = path.parent  # the group is not visible from here (a namespace, or it has been removed)
        yield _Group(path, mount.version, own=below is not None and path == named)
        while parents and path != point:
            path = path.parent
            yield _Group(path, mount.version, own=False)


def _below(own: str | None, mounted: str) -> str | None:
    """Where a group stands below a mount point that shows the folder `mounted` of the hierarchy; None: not told.

    Both names are as seen from this process's cgroup namespace; ".." in one means outside it.
    """
    if own is None or ".." in PurePosixPath(own).parts or ".." in PurePosixPath(mounted).parts:
        return None
    try:
        return str(PurePosixPath(own).relative_to(mounted))
    except ValueError:
        return None


def _own_groups(root: Path) -> dict[str, str]:
    """Controller -> path of this process's group in its hierarchy; the unified hierarchy under ""."""
    groups: dict[str, str] = {}
    for line in (read_text(at(root, "/proc/self/cgroup")) or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for name in parts[1].split(","):
                groups[name] = parts[2].removesuffix(" (deleted)")
    return groups


def _mounts(root: Path) -> list[_Mount]:
    mounts = []
    for line in (read_text(at(root, "/proc/self/mountinfo")) or "").splitlines():
        before, dash, after = line.partition(" - ")
        place, kind = before.split(" "), after.split(" ")
        if not dash or len(place) < 6 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(kind[-1].split(",")) if kind[0] == "cgroup" else frozenset[str]()
        version = 1 if kind[0] == "cgroup" else 2
        mounts.append(_Mount(_unescaped(place[4]), _unescaped(place[3]), version, controllers))
    return mounts or _usual_mounts(root)


def _usual_mounts(root: Path) -> list[_Mount]:
    """The places distributions use, for sandboxes that hide /proc/self/mountinfo."""
    base = "/sys/fs/cgroup"
    if at(root, f"{base}/cgroup.controllers").exists():
        return [_Mount(base, "/", 2, frozenset())]
    mounts = []
    for name in ("memory", "cpu", "cpu,cpuacct", "cpuset"):
        if at(root, f"{base}/{name}").is_dir():
            mounts.append(_Mount(f"{base}/{name}", "/", 1, frozenset(name.split(","))))
    if at(root, f"{base}/unified/cgroup.controllers").exists():
        mounts.append(_Mount(f"{base}/unified", "/", 2, frozenset()))
    return mounts


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _limits(group: Path, name: str, root: Path) -> list[Limit]:
    value = read_int(group / name)  # "max" is no integer
    if value is None or not 0 <= value < _NO_LIMIT:
        return []
    return [Limit(value, _shown(group / name, root))]


def _shown(path: Path, root: Path) -> str:
    return "/" + str(path.relative_to(root)).lstrip("/")
