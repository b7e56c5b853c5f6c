"""envs: parsing, precedence and who set what."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from training_xpu import envs
from training_xpu.errors import UserError


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "yes", "On", " true "])
def test_words_for_true(text: str) -> None:
    assert envs.parse_boolean("X", text) is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "OFF"])
def test_words_for_false(text: str) -> None:
    assert envs.parse_boolean("X", text) is False


@pytest.mark.parametrize("text", ["maybe", "2", "auto", "truee", "y"])
def test_anything_else_is_an_error_that_names_variable_value_and_remedy(text: str) -> None:
    with pytest.raises(UserError) as caught:
        envs.parse_boolean("TRAINING_XPU_DISABLE", text)
    assert "TRAINING_XPU_DISABLE" in caught.value.problem
    assert repr(text) in caught.value.problem
    assert "true or false" in caught.value.remedy


def test_three_answers() -> None:
    assert [envs.parse_asked("X", t) for t in ("Auto", "on", "0")] == ["auto", "true", "false"]
    with pytest.raises(UserError, match="none of true, false and auto"):
        envs.parse_asked("X", "sometimes")


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_XPU_DISABLE", "")
    monkeypatch.setenv("TRAINING_XPU_REPORT", "  ")
    assert envs.disabled() is False
    assert envs.report_folder() is None


def test_only_declared_variables_can_be_read() -> None:
    with pytest.raises(KeyError, match="not declared"):
        envs.get("EDITOR")


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINING_XPU_LOG", raising=False)
    assert envs.log_level() == 30
    monkeypatch.setenv("TRAINING_XPU_LOG", "DEBUG")
    assert envs.log_level() == 10
    monkeypatch.setenv("TRAINING_XPU_LOG", "warn")
    with pytest.raises(UserError) as caught:
        envs.log_level()
    assert caught.value.remedy == "Did you mean warning?"


def test_cache_folder_prefers_ours_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("TRAINING_XPU_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert envs.cache_folder() == Path("/home/someone/.cache/training-xpu")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert envs.cache_folder() == Path("/var/cache/training-xpu")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert envs.cache_folder() == Path("/home/someone/.cache/training-xpu")
    monkeypatch.setenv("TRAINING_XPU_CACHE", "~/mine")
    assert envs.cache_folder() == Path("/home/someone/mine")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.VARIABLES.values():
        if variable.section == "launcher":
            monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.usefixtures("no_launcher")
class TestDistributed:
    def test_alone(self) -> None:
        place = envs.distributed()
        assert (place.launched, place.rank, place.world_size, place.local_rank) == (False, 0, 1, 0)

    def test_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "job",
        }.items():
            monkeypatch.setenv(name, value)
        assert envs.distributed() == envs.Distributed(True, 5, 8, 1, 4, 1, "node0", 29500, "job")

    def test_open_mpi(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
        place = envs.distributed()
        assert (place.launched, place.rank, place.world_size, place.local_rank) == (True, 3, 4, 1)

    def test_rank_without_world_size_is_no_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        assert not envs.distributed().launched

    @pytest.mark.parametrize(("rank", "size"), [("two", "4"), ("4", "4"), ("-1", "4"), ("0", "1.5")])
    def test_nonsense(self, monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(UserError):
            envs.distributed()


def test_who_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    presets = tmp_path / "defaults"
    presets.write_text("# presets\nexport OMP_NUM_THREADS=8\nNCCL_DEBUG='WARN'\n\nnonsense\n")
    monkeypatch.setenv("TRAINING_XPU_IMAGE_DEFAULTS", str(presets))
    monkeypatch.setenv("TRAINING_XPU_SET", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.delenv("NOT_SET_AT_ALL", raising=False)
    assert envs.who_set("OMP_NUM_THREADS") == "image"
    assert envs.who_set("NCCL_DEBUG") == "image"
    assert envs.who_set("NOT_SET_AT_ALL") is None
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert envs.who_set("OMP_NUM_THREADS") == "user"
    envs.set_for_children({"OMP_NUM_THREADS": "2"})
    assert envs.who_set("OMP_NUM_THREADS") == "ours"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert envs.who_set("OMP_NUM_THREADS") == "user"  # changed again after us


def test_a_child_knows_what_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINING_XPU_SET", raising=False)
    monkeypatch.delenv("TRAINING_XPU_RUNS", raising=False)
    environment = envs.child_environment({"TRAINING_XPU_RUNS": "a=b c"})
    assert envs.who_set("TRAINING_XPU_RUNS") is None
    code = "from training_xpu import envs; print(envs.who_set('TRAINING_XPU_RUNS'), envs.who_set('PATH'))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["ours", "user"]


def test_damaged_bookkeeping_makes_everything_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_XPU_SET", "{not json")
    monkeypatch.setenv("TRAINING_XPU_RUNS", "x")
    assert envs.who_set("TRAINING_XPU_RUNS") == "user"


def test_variables_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**envs.snapshot(), "TRAINING_XPU_REPORT": "/some where"}
    child = subprocess.Popen(["sleep", "60"], env=environment)
    try:
        while not Path(f"/proc/{child.pid}/environ").read_bytes():  # the kernel is still starting the program
            pass
        assert envs.of_process(child.pid, ["TRAINING_XPU_REPORT"]) == {"TRAINING_XPU_REPORT": "/some where"}
    finally:
        child.kill()
        child.wait()
    with pytest.raises(UserError, match="no process"):
        envs.of_process(child.pid, ["PATH"])


def test_every_declaration_is_complete_and_no_variable_promises_too_much() -> None:
    assert {v.since for v in envs.VARIABLES.values()} == {"0.1.0"}
    assert all(v.meaning.endswith(".") for v in envs.VARIABLES.values())
    sources = "".join(p.read_text() for p in (Path(envs.__file__).parent).rglob("*.py"))
    for variable in envs.VARIABLES.values():
        assert sources.count(f'"{variable.name}"') >= 2, f"{variable.name} is declared and never read"


def test_what_is_read_is_declared() -> None:
    sources = "".join(p.read_text() for p in (Path(envs.__file__).parent).rglob("*.py"))
    read = set(re.findall(r'snapshot\(\)(?:\.get\(|\[)"(\w+)"', sources))
    assert read
    assert read <= set(envs.VARIABLES)


def test_importing_it_needs_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, training_xpu\n"
        "from training_xpu import autoload, envs, features, report, roles\n"
        "print([m for m in ('torch', 'pydantic', 'typer') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
