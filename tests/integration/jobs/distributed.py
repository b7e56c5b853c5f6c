"""Two ranks: DDP for two steps, then FSDP2 for two steps; data come from spawned workers."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(model: torch.nn.Module, batches: DataLoader) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for (x,) in batches:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    dist.init_process_group("gloo")
    data = TensorDataset(torch.ones(4, 4))
    train(DistributedDataParallel(Tiny()), DataLoader(data, 2, num_workers=1, multiprocessing_context="spawn"))
    sharded = Tiny()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    train(sharded, DataLoader(data, 2))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads abort the interpreter's own end now and then


if __name__ == "__main__":
    main()
