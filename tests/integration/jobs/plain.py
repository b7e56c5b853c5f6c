"""Three optimizer steps of two micro batches each, after forwards that are no training."""

import torch
from torch import compile as bound_early


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


teacher = torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False)
model = Tiny()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = bound_early(torch.relu, backend="eager")
torch.nn.Dropout(0.5)(torch.ones(2, 4))
teacher(torch.ones(2, 4))
model.eval()
model(torch.ones(2, 4))
model.train()
with torch.no_grad():
    model(torch.ones(2, 4))
for _ in range(3):
    for _ in range(2):
        compiled(model(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
