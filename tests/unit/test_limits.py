"""Numbers and addresses of the command line: what is far beyond any job is refused before anything is done with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from training_xpu import device
from training_xpu.errors import CannotRunHere, UserError
from training_xpu.perf import limits
from training_xpu.perf.request import TrainingRequest
from training_xpu.workloads.ranks import choose_nproc


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 2)
    monkeypatch.setattr(device, "usable_memory", lambda: 16 << 30)
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


def refused(**options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        limits.check_request(TrainingRequest("ddp/x", **options))
    return caught.value


@pytest.mark.parametrize(
    ("option", "most"),
    [
        ("micro_batch", 65536),
        ("gradient_accumulation", 65536),
        ("seq_len", 16_777_216),
        ("steps", 1_000_000_000),
        ("warmup_steps", 1_000_000_000),
        ("eval_sequences", 100_000),
        ("save_every", 1_000_000_000),
        ("keep_checkpoints", 1_000_000),
        ("seed", 4294967295),
    ],
)
def test_numbers_have_an_upper_bound_that_the_error_names(option: str, most: int) -> None:
    limits.check_request(TrainingRequest("ddp/x", **{option: most}))
    for value in (most + 1, 10**12, 10**400):
        error = refused(**{option: value})
        assert error.problem.startswith(f"--{option.replace('_', '-')} {value}: must be ")
        assert error.problem.endswith(f" to {most}")


def test_processes_are_bounded_by_the_cores() -> None:
    limits.check_request(TrainingRequest("ddp/x", dataloader_workers=16))
    assert "--dataloader-workers 17: at most 16 for each rank" in refused(dataloader_workers=17).problem
    assert choose_nproc(16, 0) == 16
    with pytest.raises(UserError, match="--nproc 1000000000000: at most 16 ranks") as caught:
        choose_nproc(10**12, 0)
    assert caught.value.remedy == "Such as: --nproc 2"
    with pytest.raises(CannotRunHere, match=r"--nproc 2: this machine has 1 accelerator\n"):
        choose_nproc(2, 1)


def test_a_launcher_decides_on_its_ranks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert choose_nproc(64, 0) == 64
    limits.check_request(TrainingRequest("ddp/x", nnodes=2, rdzv_endpoint="set-by-the-launcher"))


def test_nodes() -> None:
    assert "must be 1 to 100000" in refused(nnodes=10**12, rdzv_endpoint="a:1").problem


@pytest.mark.parametrize(
    "endpoint", ["localhost:1", "node-0.cluster.local:65535", "10.0.0.7:29400", "[fd00::1]:29400", "[fe80::1%eth0]:80"]
)
def test_meeting_points(endpoint: str) -> None:
    limits.check_request(TrainingRequest("ddp/x", nnodes=2, rdzv_endpoint=endpoint))


@pytest.mark.parametrize(
    "endpoint",
    ["", " ", "node0", "node0:", ":29400", "node0:0", "node0:65536", "node0:x", "fd00::1:29400", "[fd00::1]", "a b:1",
     "http://node0:1", "node0:29400\n", "node0:-1", "node0:٣"],
)  # fmt: skip
def test_what_is_no_meeting_point(endpoint: str) -> None:
    error = refused(nnodes=2, rdzv_endpoint=endpoint)
    assert error.problem == f"--rdzv-endpoint {endpoint!r}: must be HOST:PORT, the port from 1 to 65535"
    assert "[fd00::1]:29400" in error.remedy


def test_volume_of_a_job() -> None:
    small = {
        "steps": 10, "nproc": 2, "world_size": 2, "micro_batch": 1, "gradient_accumulation": 1, "sequence_length": 1024,
        "eval_sequences": 0,
    }  # fmt: skip
    limits.check_volume(**small)
    # 100,000 sequences of 1 Mi tokens, 24 bytes each, over two ranks.
    with pytest.raises(UserError, match=r"--eval-sequences 100000: their tokens take 1,172 GiB of a rank's 8 GiB"):
        limits.check_volume(**{**small, "sequence_length": 1 << 20, "eval_sequences": 100_000})
    with pytest.raises(UserError, match=r"more than 2\*\*62 sequences"):
        limits.check_volume(**{**small, "steps": 10**9, "world_size": 10**10, "nproc": 1})


def test_every_number_of_a_request_is_bounded() -> None:
    """A new option must not be forgotten."""
    elsewhere = {"zero", "learning_rate", "node_rank"}
    for field in dataclasses.fields(TrainingRequest):
        if str(field.type).removesuffix(" | None") in ("int", "float") and field.name not in elsewhere:
            assert f"--{field.name.replace('_', '-')}" in limits.RANGES
