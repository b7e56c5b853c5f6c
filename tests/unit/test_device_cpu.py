"""Cores, model and instruction sets on fake trees."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from training_xpu import device
from training_xpu.device import cpu
from training_xpu.device.files import format_cpu_list, parse_cpu_list


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def eight_threads_on_four_cores(allowed: str = "0-7") -> dict[str, str]:
    files = {
        "/sys/devices/system/cpu/online": "0-7",
        "/proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{allowed}",
    }
    for number in range(8):
        siblings = f"{number % 4},{number % 4 + 4}"
        files[f"/sys/devices/system/cpu/cpu{number}/topology/core_cpus_list"] = siblings
    return files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3", {0, 1, 2, 3}),
        ("0,2-3,8", {0, 2, 3, 8}),
        ("0-7:2/4", {0, 1, 4, 5}),
        ("", set()),
        ("a-b,5", {5}),
        ("3-1", set()),
        ("0-99999999", set()),
        (None, set()),
    ],
)
def test_cpu_lists(text: str | None, expected: set[int]) -> None:
    assert parse_cpu_list(text) == expected


def test_cpu_lists_are_written_as_they_are_read() -> None:
    assert format_cpu_list(frozenset({0, 1, 2, 8, 10, 11})) == "0-2,8,10-11"
    assert format_cpu_list(frozenset()) == ""


def test_hardware_threads_and_cores_are_told_apart(tmp_path: Path) -> None:
    cores = device.cores(tree(tmp_path, eight_threads_on_four_cores()))
    assert (cores.online_logical, cores.online_physical) == (8, 4)
    assert (cores.usable_logical, cores.usable_physical) == (8, 4)
    assert cores.threads_per_core == 2


def test_affinity_to_both_threads_of_one_core(tmp_path: Path) -> None:
    cores = device.cores(tree(tmp_path, eight_threads_on_four_cores("1,5")))
    assert (cores.usable_logical, cores.usable_physical) == (2, 1)
    assert cores.online_physical == 4


def test_quota_and_cpuset_narrow_further(tmp_path: Path) -> None:
    files = {
        **eight_threads_on_four_cores("0-5"),
        "/proc/self/cgroup": "0::/job",
        "/proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "/sys/fs/cgroup/cpu.max": "max 100000",
        "/sys/fs/cgroup/job/cpu.max": "250000 100000",
        "/sys/fs/cgroup/job/cpuset.cpus.effective": "0-3",
    }
    root = tree(tmp_path, files)
    cores = device.cores(root)
    assert cores.allowed == {0, 1, 2, 3}
    assert cores.quota == 2.5
    assert cores.quota_source == "/sys/fs/cgroup/job/cpu.max"
    assert (cores.usable_logical, cores.usable_physical) == (2, 2)
    assert device.usable_cores(root) == 2


@pytest.mark.parametrize(
    ("quota", "threads"), [(0.1, 1), (1.0, 1), (1.5, 1), (1.95, 2), (2.5, 2), (3.9, 4), (64.0, 64)]
)
def test_fractional_quotas(quota: float, threads: int) -> None:
    assert cpu.whole_cores(quota) == threads


def test_without_topology_each_cpu_is_a_core(tmp_path: Path) -> None:
    root = tree(
        tmp_path, {"/proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\n\nprocessor\t: 1\nmodel name\t: B"}
    )
    cores = device.cores(root)
    assert (cores.online_logical, cores.online_physical, cores.usable_physical) == (2, 2, 2)


def test_x86_model_and_instruction_sets(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "/proc/cpuinfo": "processor : 0\nmodel name : INTEL(R)  XEON(R)   PLATINUM 8582C\n"
            "flags : fpu sse2 amx_bf16 avx2 avx512f avx512_bf16 amx_tile rdrand"
        },
    )
    assert device.cpu_model(root) == "INTEL(R) XEON(R) PLATINUM 8582C"
    assert device.isa_flags(root) == ["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"]


def test_arm_model_and_instruction_sets(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "/proc/cpuinfo": "processor : 0\nFeatures : fp asimd sve bf16 i8mm sve2\n"
            "CPU implementer : 0x41\nCPU architecture: 8\nCPU part : 0xd4f"
        },
    )
    assert device.cpu_model(root) == "Arm Neoverse V2"
    assert device.isa_flags(root) == ["asimd", "bf16", "i8mm", "sve", "sve2"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags : avx2 fma f16c", False),
        ("flags : avx2 avx512f", False),
        ("flags : avx2 avx512f avx512bw avx512dq avx512vl", True),
        ("Features : asimd asimdhp", False),
        ("Features : asimd bf16 i8mm", True),
    ],
)
def test_bf16_kernels_are_told_from_instruction_sets(flags: str, expected: bool, tmp_path: Path) -> None:
    assert device.has_bf16_kernels(tree(tmp_path, {"/proc/cpuinfo": f"processor : 0\n{flags}\n"})) is expected


def test_unknown_arm_part_is_named_by_its_numbers(tmp_path: Path) -> None:
    root = tree(tmp_path, {"/proc/cpuinfo": "processor : 0\nCPU implementer : 0x99\nCPU part : 0x123"})
    assert device.cpu_model(root) == "ARM implementer 0x99 part 0x123"


def test_empty_tree_still_answers(tmp_path: Path) -> None:
    assert device.cpu_model(tmp_path)
    assert device.isa_flags(tmp_path) == []
    assert device.cores(tmp_path).usable_logical == (os.cpu_count() or 1)
    assert device.numa_nodes(tmp_path) == []


def test_numa_nodes(tmp_path: Path) -> None:
    base = "/sys/devices/system/node"
    root = tree(
        tmp_path,
        {
            f"{base}/node0/cpulist": "0-3",
            f"{base}/node0/meminfo": "Node 0 MemTotal:       1000 kB\nNode 0 MemFree: 10 kB",
            f"{base}/node1/cpulist": "4-7",
            f"{base}/node10/cpulist": "",  # memory only, as CXL and HBM nodes are
        },
    )
    assert device.numa_nodes(root) == [
        device.NumaNode(0, frozenset({0, 1, 2, 3}), 1024000),
        device.NumaNode(1, frozenset({4, 5, 6, 7}), None),
    ]


def test_this_process_is_bound_as_the_kernel_says() -> None:
    assert device.cores().allowed <= frozenset(os.sched_getaffinity(0))
    assert 1 <= device.usable_cores() <= len(os.sched_getaffinity(0))
