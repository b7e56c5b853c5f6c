"""What the tests of the training path share: a tiny model, a little text, and `ljperf` as a user starts it."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from training_xpu.workloads.config import JOB_FILE, EngineName, JobConfig

HERE = Path(__file__).parent
MARK = "TRAINING_TEST_MARK"  # set for every process of one command, so that those left behind can be found

# About 0.16 million parameters.
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
WORDS = "the a model trains on real text with many words and few rules so that each batch differs and its loss falls"


def write_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def write_text(file: Path, documents: int = 400, seed: int = 1) -> Path:
    """JSONL with documents of 5 to 60 words."""
    chance, words = random.Random(seed), WORDS.split()
    lines = [" ".join(chance.choice(words) for _ in range(chance.randint(5, 60))) + "." for _ in range(documents)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


@dataclass(frozen=True)
class Run:
    """A run folder, read as plain JSON, so that the project's own reading is not trusted."""

    folder: Path

    @property
    def record(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        return loaded

    def steps(self, rank: int | None = None) -> list[dict[str, Any]]:
        steps = lines_of(self.folder / "steps.jsonl")
        return sorted((s for s in steps if rank in (None, s["rank"])), key=lambda s: (s["step"], s["rank"]))

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [e for e in lines_of(self.folder / "events.jsonl") if kind in (None, e["event"])]

    def evaluation(self, when: str) -> float:
        (found,) = (e["value"] for e in self.events("evaluation") if e["name"] == when and e["rank"] == 0)
        return float(found)

    @property
    def losses(self) -> list[float]:
        return [s["loss"] for s in self.steps(rank=0)]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@dataclass
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout, which must hold nothing else."""
        loaded: dict[str, Any] = json.loads(self.stdout)
        return loaded

    @property
    def run(self) -> Run:
        """The run of the first arm."""
        return Run(Path(self.document["arms"][0]["run"]))


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 180.0) -> Any:
    """Polls until the condition holds. The limit only ends a hanging test."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"never seen: {what}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def marked(mark: str) -> list[psutil.Process]:
    """Every living process whose environment carries the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


class Started:
    """A command that runs beside the test."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        self.process = process
        self.mark = mark
        self._begun = time.monotonic()

    def done(self, seconds: float = 300.0) -> Done:
        stdout, stderr = self.process.communicate(timeout=seconds)
        return Done(self.process.returncode, stdout or "", stderr or "", time.monotonic() - self._begun)

    def ranks(self) -> list[psutil.Process]:
        """The worker processes, in the order of their ranks."""
        found = {}
        for process in marked(self.mark):
            try:
                if "training_xpu.workloads.worker" in process.cmdline() and "RANK" in process.environ():
                    parent = process.parent()
                    if parent is not None and "training_xpu.workloads.launch" in parent.cmdline():
                        found[int(process.environ()["RANK"])] = process
            except psutil.Error:
                continue
        return [found[rank] for rank in sorted(found)]

    def assert_nothing_left(self) -> None:
        wait_for(lambda: not marked(self.mark), f"the end of {marked(self.mark)}", seconds=20)

    def kill_all(self) -> None:
        """kill -9 of the whole tree."""
        for process in marked(self.mark):
            process.send_signal(signal.SIGSTOP)  # so that nobody sees the end of another
        for process in marked(self.mark):
            process.kill()
        self.process.wait()


class Ljperf:
    """Starts `ljperf` in a folder with the tiny model `./tiny` and the text `text.jsonl`."""

    COMMAND = (str(Path(sys.executable).with_name("ljperf")),)

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.runs = Path(environment["TRAINING_XPU_RUNS"])

    def start(
        self,
        *arguments: str,
        command: tuple[str, ...] = COMMAND,
        environment: dict[str, str] | None = None,
        plugin: str | None = None,
        **options: Any,
    ) -> Started:
        """
        Args:
            command: what stands before the arguments.
            environment: more variables.
            plugin: folder under tests/integration with a sitecustomize.py for every process.
        """
        mark = uuid.uuid4().hex
        full = {**self.environment, MARK: mark, **(environment or {})}
        if plugin is not None:
            full["PYTHONPATH"] = str(HERE / plugin)
        settings = {"cwd": self.folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = subprocess.Popen([*command, *arguments], env=full, start_new_session=True, **settings)
        return Started(process, mark)

    def __call__(self, *arguments: str, expect: int = 0, **options: Any) -> Done:
        """Runs to the end and checks the exit code."""
        started = self.start(*arguments, **options)
        done = started.done()
        assert done.code == expect, f"exit code {done.code}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    def train(self, engine: str, *more: str, expect: int = 0, **options: Any) -> Done:
        """A short `ljperf train --json` of the tiny model on one rank, unless `more` says otherwise."""
        return self(*self.training(engine, *more), expect=expect, **options)

    def training(self, engine: str, *more: str) -> list[str]:
        """The arguments of `train`; an option given again wins."""
        default = "--data text.jsonl --seq-len 64 --micro-batch 2 --steps 4 --nproc 1 --dtype fp32 --no-live-bytes"
        saving = [] if any(o in more for o in ("--save-model", "--no-save-model")) else ["--no-save-model"]
        return ["train", "--model", f"{engine}/./tiny", *default.split(), "--json", *saving, *more]


def resolve_job(ljperf: Ljperf, model: Path | None = None) -> JobConfig:
    """What `ljperf train` would hand to its ranks: DDP in fp32, micro batch 4 on one rank, packed, four steps."""
    from training_xpu.perf.request import TrainingRequest
    from training_xpu.perf.resolve import resolve

    request = TrainingRequest(
        model=f"ddp/{model or ljperf.folder / 'tiny'}",
        data=ljperf.folder / "text.jsonl",
        dtype="fp32",
        micro_batch=4,
        seq_len=64,
        steps=4,
        warmup_steps=2,
        eval_sequences=8,
        nproc=1,
        live_bytes=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ljperf.environment.items():
            patch.setenv(name, value)
        return resolve(request, 4, lambda text: None)


def for_engine(job: JobConfig, engine: str, **changes: Any) -> JobConfig:
    if engine.startswith("zero"):
        changes |= {"engine": EngineName.DEEPSPEED, "zero_stage": int(engine[-1])}
    else:
        changes["engine"] = EngineName(engine)
    return job.model_copy(update=changes)


_built: set[str] = set()


def build_operations(folder: str, environment: dict[str, str]) -> None:
    """Builds DeepSpeed's operations once in a session, as `ljperf` does: ranks would wait for a killed build."""
    if folder not in _built:
        command = [sys.executable, "-m", "training_xpu.engines.deepspeed_ops", folder]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        _built.add(folder)


def run_jobs(jobs: dict[str, JobConfig], ranks: int, folder: Path, ljperf: Ljperf) -> dict[str, Run]:
    """Trains every job on `ranks` processes, one job after the other."""
    for number, (name, job) in enumerate(jobs.items()):
        place = folder / f"{number:02d}-{name}"
        place.mkdir(parents=True)
        job.model_copy(update={"nproc": ranks}).write(place / JOB_FILE)
    shared = {**ljperf.environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    shared |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE / "jobs" / "run_jobs.py"), str(folder)]
    logs = [folder.parent / f"{folder.name}-{rank}.log" for rank in range(ranks)]
    if any(job.engine is EngineName.DEEPSPEED for job in jobs.values()):
        build_operations(shared["TORCH_EXTENSIONS_DIR"], shared)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as stream:
                processes.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT))
        codes = [process.wait(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)
    return {name: Run(folder / f"{number:02d}-{name}") for number, name in enumerate(jobs)}


def losses_near(found: list[float], expected: list[float]) -> None:
    """The same training, in another order of summation."""
    assert found == pytest.approx(expected, rel=2e-6)
