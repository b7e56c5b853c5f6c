"""DeepSpeed ZeRO 0-3 through `deepspeed.initialize`, with the optimizer DeepSpeed itself picks for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from training_xpu.engines.base import EngineSettings
from training_xpu.engines.model import checkpoint_activations, evaluation_mode

STATE_TAG = "state"


def deepspeed_config(settings: EngineSettings, fused_optimizer: bool) -> dict[str, Any]:
    """The configuration a user would write: documented defaults, `stage3_prefetch_bucket_size` left empty.

    Args:
        fused_optimizer: DeepSpeed's own fused AdamW, which needs a C++ compiler; otherwise torch's.
    """
    adam = settings.optimizer
    parameters: dict[str, Any] = {
        "lr": adam.learning_rate,
        "betas": [adam.beta1, adam.beta2],
        "eps": adam.epsilon,
        "weight_decay": adam.weight_decay,
    }
    if not fused_optimizer:
        parameters["torch_adam"] = True
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.gradient_accumulation,
        "gradient_clipping": adam.gradient_clipping,
        "zero_optimization": {"stage": settings.zero_stage},
        "optimizer": {"type": "AdamW", "params": parameters},
        "steps_per_print": 2**31,
    }
    if settings.dtype != "fp32":
        config[settings.dtype] = {"enabled": True}
    return config


def fused_optimizer_loads() -> bool:
    """Whether DeepSpeed's fused AdamW can be built or loaded here."""
    from deepspeed.ops.op_builder import FusedAdamBuilder

    try:
        FusedAdamBuilder().load(verbose=False)
    except Exception:  # whatever the compiler or the loader did not like
        return False
    return True


class DeepSpeedTraining:
    """See `TrainingEngine`."""

    name = "deepspeed"

    def __init__(
        self,
        build: Callable[[], torch.nn.Module],
        settings: EngineSettings,
        device: torch.device,
        partition_while_building: bool,
    ) -> None:
        """Wraps the model that `build` returns.

        Args:
            partition_while_building: under ZeRO-3, build with every weight partitioned at once, for models that do not
                fit a rank's memory whole.
        """
        import deepspeed

        self.fused = fused_optimizer_loads()
        config = deepspeed_config(settings, self.fused)
        if partition_while_building and settings.zero_stage == 3:
            with _partitioned_by_transformers(config):
                self.model = build()
        else:
            self.model = build()
        if settings.checkpoint_activations:
            checkpoint_activations(self.model)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=config
        )

    def forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        return self.engine(**inputs)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield
        if not last:
            self.engine.step()  # DeepSpeed counts micro batches by it; only `update` reaches the boundary

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def update(self, learning_rate: float) -> float | None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluation_mode(self.engine)

    def save_state(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=STATE_TAG)

    def load_state(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag=STATE_TAG)

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        if self.engine.zero_optimization_partition_weights():
            gathered = self.engine._zero3_consolidated_16bit_state_dict()
        else:
            gathered = self.model.state_dict()
        return gathered if torch.distributed.get_rank() == 0 else None


@contextlib.contextmanager
def _partitioned_by_transformers(config: dict[str, Any]) -> Iterator[None]:
    """While it is open, transformers builds or loads models partitioned, and draws or reads one module at a time."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    hold: Any = HfDeepSpeedConfig
    alive = hold(config)  # transformers itself has a weak reference only
    yield
    del alive
