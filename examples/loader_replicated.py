"""Two spirals told apart, from a DataLoader with two workers: a plain PyTorch script."""

import murmurate
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Spirals(Dataset):
    """Points on two spirals with some noise; what an item costs, a worker pays."""

    def __init__(self, points, seed):
        generator = torch.Generator().manual_seed(seed)
        self.along = 0.5 + 2.5 * torch.rand(points, generator=generator)
        self.noise = 0.05 * torch.randn(points, 2, generator=generator)

    def __len__(self):
        return len(self.along)

    def __getitem__(self, index):
        label = index % 2
        angle = 2.0 * self.along[index] + torch.pi * label
        point = torch.stack([angle.cos(), angle.sin()]) * self.along[index] / 3.0
        return point + self.noise[index], label


def main(replicator, epochs=20):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer = replicator.wrap_optimizer(optimizer, model)
    loader = DataLoader(
        Spirals(1024, seed=1),
        batch_size=128,
        shuffle=True,
        generator=torch.Generator().manual_seed(2),
        num_workers=2,
        persistent_workers=True,
    )
    for _ in range(epochs):
        for points, labels in replicator.inputs(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
    points, labels = next(iter(DataLoader(Spirals(512, seed=3), batch_size=512)))
    right = (model(points).argmax(1) == labels).float().mean()
    print(f"loss {loss.item():.3f}, {right.item():.0%} right on points it has not seen")
    return [p.detach() for p in model.parameters()]


if __name__ == "__main__":
    murmurate.run(main, replicas=2, strategy="all-reduce")
