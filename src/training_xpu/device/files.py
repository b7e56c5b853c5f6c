"""Reading /proc and /sys below a root folder, so that every reader can be tested on a fake tree."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def at(root: Path, absolute: str) -> Path:
    """The place of an absolute path below root."""
    return root / absolute.lstrip("/")


def read_text(path: Path) -> str | None:
    """The text of a file without outer white space; None when it is missing, unreadable or a folder."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """The integer a file consists of; None when there is none."""
    return as_int(read_text(path))


def read_fields(path: Path) -> dict[str, str]:
    """A file of `name value` or `name: value` lines as a mapping; later lines win; empty when unreadable."""
    fields: dict[str, str] = {}
    for line in (read_text(path) or "").splitlines():
        name, _, value = line.replace(":", " ", 1).strip().partition(" ")
        if name:
            fields[name] = value.strip()
    return fields


def as_int(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def parse_cpu_list(text: str | None) -> frozenset[int]:
    """The kernel's list format, "0-3,8,10-11"; parts that are malformed are passed over.

    The stride form "0-31:2/4" (two of every four) is understood too.
    """
    cpus: set[int] = set()
    for part in (text or "").replace("\n", ",").split(","):
        span, _, stride = part.strip().partition(":")
        first, dash, last = span.partition("-")
        low, high = as_int(first), as_int(last if dash else first)
        if low is None or high is None or low < 0 or high < low or high - low > 1 << 16:
            continue
        used, _, group = stride.partition("/")
        take, every = as_int(used), as_int(group)
        if stride and (not take or not every):
            continue
        cpus.update(c for c in range(low, high + 1) if not every or not take or (c - low) % every < take)
    return frozenset(cpus)


def format_cpu_list(cpus: frozenset[int]) -> str:
    """The inverse of parse_cpu_list: "0-3,8"."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
