"""Two trainers that torch.multiprocessing spawns, as in many DDP tutorials."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing


def train(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads abort the interpreter's own end now and then


if __name__ == "__main__":
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ["FREE_PORT"]
    torch.multiprocessing.spawn(train, nprocs=2)
