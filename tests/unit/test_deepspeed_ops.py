"""What a killed build leaves is cleared away, and a lock in use is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from training_xpu.engines import deepspeed_ops
from training_xpu.engines.deepspeed_ops import build_operations


def test_a_lock_that_nobody_holds_is_removed_and_one_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_ops, "_builds", lambda name: name == "ShareMemCommBuilder")
    left, used = tmp_path / "fused_adam" / "lock", tmp_path / "deepspeed_shm_comm" / "lock"
    for lock in (left, used):
        lock.parent.mkdir()
    left.touch()
    baton = FileBaton(str(used))  # torch's own
    assert baton.try_acquire()
    assert build_operations(tmp_path) == ["FusedAdamBuilder"]
    assert (left.exists(), used.exists()) == (False, True)
    baton.release()
    assert not used.exists()
