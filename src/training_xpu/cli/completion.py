"""What the shell offers after TAB."""

from __future__ import annotations


def complete_workload(incomplete: str) -> list[str]:
    from training_xpu.workloads.catalogue import ENGINES, model_names

    every = [f"{engine}/{model}" for engine in ENGINES for model in model_names()]
    return [name for name in every if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    from training_xpu import envs

    folder = envs.runs_folder()
    names = sorted((path.name for path in folder.iterdir() if path.is_dir()), reverse=True) if folder.is_dir() else []
    return [name for name in ("latest", *names) if name.startswith(incomplete)]
