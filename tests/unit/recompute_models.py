"""Small models for the tests of switching, one training step of them, and what is to be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training_xpu.blocks import find_blocks

VOCABULARY = 64


def text(batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": tokens, "labels": tokens}


def llama(layers: int = 4, **settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        attention_dropout=0.2,
        **{"use_cache": False, **settings},
    )
    return LlamaForCausalLM(config).train()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY)).train()


@dataclass
class Output:  # engines look for tensors in dataclasses
    loss: torch.Tensor


class PlainBlock(torch.nn.Module):
    def __init__(self, width: int, dropout: float, in_place: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up_proj = torch.nn.Linear(width, 2 * width)
        self.down_proj = torch.nn.Linear(2 * width, width)
        self.activation = torch.nn.ReLU(inplace=in_place)
        self.dropout = torch.nn.Dropout(dropout)
        self.last = torch.nn.Identity()

    def forward(self, hidden: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        inner = self.activation(self.up_proj(self.norm(hidden)))
        return self.last(hidden + self.dropout(torch.tanh(self.down_proj(self.dropout(inner)))) + scale)


class Plain(torch.nn.Module):
    """A language model that knows nothing of checkpointing."""

    def __init__(self, dropout: float = 0.1, in_place: bool = False, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList([PlainBlock(width, dropout, in_place) for _ in range(layers)])
        self.head = torch.nn.Linear(width, VOCABULARY)

    def run_block(self, block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return block(hidden, scale=0.5)  # type: ignore[no-any-return]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = self.embedding(input_ids)
        for block in self.layers:
            hidden = self.run_block(block, hidden)
        logits = self.head(hidden).float()
        return Output(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class LoraLinear(torch.nn.Module):
    """A frozen linear layer with a low-rank addition that is trained."""

    def __init__(self, base: torch.nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up(self.down(hidden))  # type: ignore[no-any-return]

    @staticmethod
    def replace_in(model: torch.nn.Module, name: str) -> None:
        for module in list(model.modules()):
            if isinstance(module._modules.get(name), torch.nn.Linear):
                setattr(module, name, LoraLinear(getattr(module, name)))


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [block for group in find_blocks(model) for block in group.modules]


@dataclass(frozen=True)
class Result:
    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    generator: torch.Tensor  # state of the random generator afterwards


def train_once(
    model: torch.nn.Module,
    autocast: bool = False,
    before_backward: Callable[[torch.Tensor], Any] | None = None,
    **inputs: Any,
) -> Result:
    """One forward and backward from the same random state."""
    torch.manual_seed(11)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(**text(), **inputs).loss
    if before_backward is not None:
        before_backward(loss)
    loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return Result(loss.detach(), gradients, torch.get_rng_state())


def same(a: Result, b: Result) -> bool:
    """Whether losses, gradients and random generators are equal bit by bit."""
    return (
        torch.equal(a.loss, b.loss)
        and torch.equal(a.generator, b.generator)
        and len(a.gradients) == len(b.gradients)
        and all(
            x is y if x is None or y is None else torch.equal(x, y)
            for x, y in zip(a.gradients, b.gradients, strict=True)
        )
    )


def saved_bytes(model: torch.nn.Module) -> int:
    """Bytes alive after a forward while its loss is held: what it has saved, and the weights and inputs it has used."""
    from training_xpu.recompute.prediction.live_bytes import LiveBytes

    torch.manual_seed(11)
    with LiveBytes() as counter:
        loss = model(**text()).loss
        held = counter.live
        del loss
    return held


@dataclass
class Runs:
    total: int = 0


@contextlib.contextmanager
def count_runs(blocks: Sequence[torch.nn.Module]) -> Iterator[Runs]:
    """Counts how often the first linear or norm layer of each block runs, which it does in recompute too."""
    runs = Runs()

    def ran(*_: Any) -> None:
        runs.total += 1

    firsts = [next(m for m in block.modules() if not m._modules and len(list(m.parameters()))) for block in blocks]
    handles = [first.register_forward_hook(ran) for first in firsts]
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()
