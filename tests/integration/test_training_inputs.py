"""Wrong input: refused in one or two lines, with the nearest right value, before any rank or run folder exists.

Most commands run inside the test's process, which keeps hundreds of milliseconds each; what a shell sees is tested once
per kind of error.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from training_harness import Ljperf, write_model

from training_xpu.cli.main import run
from training_xpu.perf import runner

USAGE, CANNOT = 2, 3


@pytest.fixture
def refuse(ljperf: Ljperf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line that must fail; gives back its lines on stderr."""
    for name in list(os.environ):
        if name.startswith("TRAINING_XPU_"):
            monkeypatch.delenv(name)
    for name, value in ljperf.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRAINING_XPU_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(ljperf.folder)

    def started(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a job was started")

    monkeypatch.setattr(runner, "launch_command", started)

    def check(*arguments: str, code: int = USAGE) -> list[str]:
        assert run(arguments) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = [line for line in captured.err.splitlines() if line.startswith(("ljperf: ", "  "))]
        assert lines[0].startswith("ljperf: ")
        assert len(lines) <= 2
        assert "Traceback" not in captured.err
        assert not (tmp_path / "runs").exists()
        return lines

    return check


TINY = "--data text.jsonl --seq-len 64 --micro-batch 2 --nproc 1 --model"


@pytest.mark.parametrize(
    ("command", "problem", "remedy"),
    [
        ("train --model deepspeed/lama3-8b", "lama3-8b", "deepspeed/llama3-8b"),
        ("train --model deepspede/llama3-8b", "deepspede", "deepspeed"),
        ("train --model llama3-8b", "llama3-8b", "deepspeed/llama3-8b"),
        ("train --model ddp/./nowhere", "nowhere", ""),
        ("train", "--model is missing", "ljperf train --model deepspeed/llama3-8b"),
        ("benchmark", "--model is missing", "ljperf benchmark --model deepspeed/llama3-8b"),
        ("train --model ddp/./tiny --stepz 3", "--stepz", "--steps"),
        ("trian --model ddp/./tiny", "trian", "train"),
        ("train --model ddp/./tiny --data nowhere.txt", "nowhere.txt", ""),
        ("train --model ddp/./tiny --tokenizer nowhere", "nowhere", ""),
        ("train --model ddp/./tiny --dtype bf61", "--dtype bf61", "bf16"),
        ("train --model ddp/./tiny --scale prox", "--scale prox", "proxy"),
        ("train --model ddp/./tiny --report-to tensorbord", "--report-to tensorbord", "tensorboard"),
        ("train --model ddp/./tiny --features compil", "compil", ""),
        ("benchmark --model ddp/./tiny --arms base,compil", "compil", ""),
        ("benchmark --model ddp/./tiny --arms base,base", "'base' twice", ""),
        ("benchmark --model ddp/./tiny --arms base --features base", "exclude each other", "--arms"),
        ("benchmark --model ddp/./tiny --arms ,", "names no arm", "--arms base"),
        ("train --model deepspeed/./tiny --zero 4", "--zero 4", "0, 1, 2 and 3|--zero 3"),
        ("train --model ddp/./tiny --micro-batch 0", "--micro-batch 0", "--micro-batch 1"),
        ("train --model ddp/./tiny --steps 0", "--steps 0", "--steps 1"),
        ("train --model ddp/./tiny --steps many", "--steps", ""),
        ("train --model ddp/./tiny --seed -1", "--seed -1", "--seed"),
        ("train --model ddp/./tiny --seed 4294967296", "--seed 4294967296", "--seed 42"),
        ("train --model ddp/./tiny --nproc 0", "--nproc 0", "--nproc 1"),
        ("train --model ddp/./tiny --seq-len 1", "--seq-len 1", "--seq-len 2"),
        ("train --model ddp/./tiny --gradient-accumulation 0", "--gradient-accumulation 0", "1"),
        ("train --model ddp/./tiny --learning-rate 0", "--learning-rate 0", "1e-3"),
        ("train --model ddp/./tiny --learning-rate nan", "--learning-rate nan", "1e-3"),
        ("train --model ddp/./tiny --clip -1", "--clip -1", "--clip"),
        ("train --model ddp/./tiny --warmup-steps -1", "--warmup-steps -1", "--warmup-steps"),
        ("train --model ddp/./tiny --layers 0", "--layers 0", "--layers 1"),
        ("train --model ddp/./tiny --nnodes 2", "--rdzv-endpoint", "HOST:PORT"),
        ("train --model ddp/./tiny --nnodes 2 --rdzv-endpoint a:1 --node-rank 2", "--node-rank 2", ""),
        ("train --model ddp/./tiny --save keep", "--save names a folder", "--save-every"),
        ("train --model ddp/./tiny --keep-checkpoints 0", "--keep-checkpoints 0", "--keep-checkpoints 1"),
        ("train --resume nowhere", "--resume nowhere: no such folder", "run folder"),
        ("train --resume latest", "--resume latest: no run in", "--save-every"),
        ("train --resume=", "--resume: the path is empty", "latest"),
        ("train --resume text.jsonl", "--resume text.jsonl: is no folder", "run folder"),
        ("train --model tiny", "'tiny' names no engine", "deepspeed/./tiny"),
        ("train --model ddp/./tiny --nproc 1000000000000", "--nproc 1000000000000", "8 for each usable core"),
        ("train --model ddp/./tiny --steps 1000000000000", "--steps 1000000000000", "1000000000"),
        ("train --model ddp/./tiny --eval-sequences 1000000000000", "--eval-sequences 1000000000000", "100000"),
        ("train --model ddp/./tiny --nnodes 2 --rdzv-endpoint node0", "--rdzv-endpoint 'node0'", "HOST:PORT"),
        ("train --model ddp/./tiny --save text.jsonl --save-every 1", "text.jsonl is no folder", "--save"),
        ("train --model ddp/./tiny --data text.jsonl --data-field txt", "no field 'txt'", "Did you mean text?"),
        ("train --model ddp/./tiny --output /dev/null --dry-run", "cannot write runs to /dev/null", "--output"),
        ("benchmark --model ddp/./tiny --output text.jsonl --dry-run", "cannot write runs to", "--output"),
        ("run --output /dev/null --dry-run -- true", "cannot write runs to /dev/null", "--output"),
        ("runs --output text.jsonl", "cannot read text.jsonl: Not a directory", ""),
        ("train --model= --data text.jsonl", "not of the form engine/model", "deepspeed/"),
        ("train --resume .", "no complete checkpoint", "--save-every"),
        (f"train --layers 3 {TINY} ddp/./tiny", "3", "2"),
        ("train --seq-len 200 --data short.txt --model ddp/./tiny", "short.txt", ""),
        ("--action trian --model_name ddp/./tiny", "unknown action 'trian'", "Did you mean train?"),
        ("--action train --model_name ddp/./tiny --mikro_batch 3", "--mikro-batch", "--micro-batch"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_nearest_right_value(
    refuse: Any, ljperf: Ljperf, command: str, problem: str, remedy: str
) -> None:
    (ljperf.folder / "short.txt").write_text("ten words are not enough for anything that could learn\n")
    text = "\n".join(refuse(*command.split()))
    assert problem in text
    assert any(word in text for word in remedy.split("|"))


def test_heads_that_cannot_be_divided_and_a_broken_model_folder(refuse: Any, tmp_path: Path) -> None:
    odd = write_model(tmp_path / "odd", num_attention_heads=3)
    assert "3" in refuse("train", "--model", f"ddp/{odd}", "--data", "text.jsonl")[0]
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    assert str(broken) in refuse("train", "--model", f"ddp/{broken}", "--data", "text.jsonl")[0]
    unknown = write_model(tmp_path / "unknown", model_type="lama")
    assert "lama" in "".join(refuse("train", "--model", f"ddp/{unknown}", "--data", "text.jsonl"))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_act": "nope"}, "hidden_act is 'nope'"),
        ({"pad_token_id": 512}, "pad_token_id is 512"),
        ({"head_dim": 3}, "forward pass"),
    ],
)
def test_a_model_folder_that_no_rank_could_build(
    refuse: Any, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    broken = write_model(tmp_path / "broken", **changes)
    assert word in refuse("train", "--model", f"ddp/{broken}", "--data", "text.jsonl", "--nproc", "1")[0]


def test_weights_cut_short(refuse: Any, tmp_path: Path) -> None:
    broken = write_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\0" * 5)
    for verb in ("train", "benchmark"):
        line = refuse(verb, "--model", f"ddp/{broken}", "--data", "text.jsonl", "--nproc", "1")[0]
        assert f"{broken}/model.safetensors is damaged or cut short" in line


def test_what_this_machine_lacks_is_another_kind_of_error(refuse: Any) -> None:
    lines = refuse("train", "--model", "ddp/./tiny", "--report-to", "mlflow,tensorboard", code=CANNOT)
    assert lines == [
        "ljperf: --report-to mlflow: the package mlflow is not installed",
        "  pip install 'training-xpu-pytorch[mlflow]'",
    ]


def test_the_config_file_is_refused_as_the_command_line_is(refuse: Any, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    for text, problem, remedy in (
        ("stepz: 3", "unknown option 'stepz'", "steps"),
        ("steps: many", "--steps", ""),
        ("steps: [3]", "steps cannot be [3]", ""),
        ("a: [", "not valid YAML", ""),
        ("zero: 4\nmodel: ddp/./tiny", "--zero 4", ""),
        ("model: ddp/./tini", "tini", ""),
    ):
        file.write_text(text)
        lines = refuse("train", "--config", str(file))
        assert problem in lines[0]
        assert remedy in "".join(lines)
    file.write_text("model: ddp/./tiny\nsteps: 3\n")
    assert "--steps 0" in refuse("train", "--config", str(file), "--steps", "0")[0]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [("file", "is no folder"), ("file itself", "is no folder"), ("locked", "Permission denied")],
)
def test_an_output_folder_that_cannot_be(ljperf: Ljperf, tmp_path: Path, spoil: str, word: str) -> None:
    """As a shell sees it."""
    output = tmp_path / "there" / "runs"
    options: dict[str, Any] = {}
    if spoil == "file":
        (tmp_path / "there").write_text("")
    elif spoil == "file itself":
        (tmp_path / "there").mkdir()
        output.write_text("")
    else:
        if os.geteuid() != 0 or subprocess.run(["chattr", "-V"], capture_output=True, check=False).returncode == 127:
            pytest.skip("needs root")
        output = Path("/proc/self/runs")
        word = "cannot write runs to /proc/self/runs"
    done = ljperf.train("ddp", "--output", str(output), expect=USAGE, **options)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-2].startswith(f"ljperf: cannot write runs to {output}")
    assert word in done.stderr
    assert "--output" in done.stderr.splitlines()[-1]


def test_missing_folders_of_the_output_are_made(ljperf: Ljperf, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(f"steps: 9\noutput: {tmp_path}/a/b/runs\nno-save-model: true\nseed: 7\n")
    done = ljperf.train("ddp", "--config", str(config), "--steps", "2")
    assert done.run.folder.parent == tmp_path / "a" / "b" / "runs"
    settings = json.loads((done.run.folder / "job.json").read_text())
    assert (settings["steps"], settings["seed"], settings["model_folder"]) == (2, 7, None)
