"""`ljperf models` as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from training_xpu.workloads.catalogue import model_names


def ljperf(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from training_xpu.cli.main import run; code = run(); print(sorted(m for m in "
    code += "('torch', 'transformers') if m in sys.modules), file=sys.stderr); sys.exit(code)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "160"}
    command = [sys.executable, "-c", code, "models", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def document(*arguments: str, cache: Path) -> dict[str, Any]:
    done = ljperf("--json", *arguments, cache=cache)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def test_the_table_names_every_model_and_needs_no_torch(tmp_path: Path) -> None:
    done = ljperf(cache=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in model_names():
        assert name in done.stdout
    for word in ("8.03 B", "46.7 B", "32/8", "8 x nvidia-h100-80gb", "proxy: ", "deepspeed, fsdp, ddp, transformers"):
        assert word in done.stdout
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_json_is_one_document_with_what_fits_here(tmp_path: Path) -> None:
    listed = document(cache=tmp_path)
    assert listed["schema"] == 1
    assert [model["name"] for model in listed["models"]] == model_names()
    by_name = {model["name"]: model for model in listed["models"]}
    mixtral = by_name["mixtral-8x7b"]
    assert (mixtral["parameters"], mixtral["experts"]) == (46_702_792_704, 8)
    here = by_name["llama3-8b"]["here"]
    assert here["scale"]["kind"] in ("full", "proxy")
    for part, share in by_name["llama3-8b"]["shares"].items():
        if part != "schema":
            assert here["scale"]["shares"][part] == pytest.approx(share, rel=0.1)


def test_ranks_share_the_machine(tmp_path: Path) -> None:
    one, four = document("--nproc", "1", cache=tmp_path), document("--nproc", "4", cache=tmp_path)
    assert four["ranks"] == 4
    assert four["memory_bytes_per_rank"] == one["memory_bytes_per_rank"] // 4
    assert four["flops_per_second_per_rank"] == pytest.approx(one["flops_per_second_per_rank"] / 4)


def test_one_model_in_detail(tmp_path: Path) -> None:
    done = ljperf("qwen3-8b", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in (
        "published",
        "trained here",
        "FLOPs in attention",
        "8.19 B",
        "151936",
        "Qwen/Qwen3-8B",
        "Meant for: ",
        "GiB",
    ):
        assert word in done.stdout


def test_a_model_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (model,) = document(str(tmp_path), cache=tmp_path)["models"]
    assert model["here"]["scale"]["kind"] == "full"
    assert model["layers"] == 2
    assert {value for name, value in model.items() if name.startswith("target_")} == {None}
    shown = ljperf(str(tmp_path), cache=tmp_path).stdout
    assert "Meant for" not in shown
    assert "published" not in shown.splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lama3-8b"], "Did you mean llama3-8b"),
        (["deepspeed/lama3-8b"], "Did you mean deepspeed/llama3-8b"),
        (["./nowhere"], "there is no folder"),
        (["--nproc", "0"], "--nproc"),
        (["--nproc", "1000000000000"], "--nproc 1000000000000: at most"),
    ],
)
def test_wrong_usage_is_exit_2_with_a_remedy(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = ljperf(*arguments, cache=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
