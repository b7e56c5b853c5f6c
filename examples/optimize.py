"""Recompute by code in a plain PyTorch loop: the same as CHECKPOINT_OPTIMIZATION=true."""

import torch

from training_xpu import recompute


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(self.norm(hidden))


class Model(torch.nn.Module):
    def __init__(self, width: int = 256, depth: int = 12) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 10)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizing = recompute.optimize(model, budget="live:200MiB")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(6):
        inputs, labels = torch.randn(2048, 256), torch.randint(0, 10, (2048,))
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, {optimizing.layers_recomputed} of 12 blocks recomputed")


if __name__ == "__main__":
    main()
