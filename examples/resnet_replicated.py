"""A small ResNet on generated images: a plain PyTorch script."""

import murmurate
import torch
import torch.nn.functional as F
from torch import nn

CLASSES, SIDE, BATCH = 4, 12, 24


class Block(nn.Module):
    """Two 3x3 convolutions beside a short cut (He et al. 2016)."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.short(x))


def resnet():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), Block(8, 8, 1), Block(8, 16, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


def batches(count, seed):
    """Noise on stripes whose direction and width are the class."""
    generator = torch.Generator().manual_seed(seed)
    across = torch.arange(SIDE, dtype=torch.float32)
    patterns = torch.stack([torch.sin(across * (1.0 + k // 2)).expand(SIDE, SIDE) for k in range(CLASSES)])
    patterns = torch.stack([p.T if k % 2 else p for k, p in enumerate(patterns)])
    for _ in range(count):
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        noise = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
        yield patterns[labels].unsqueeze(1) + noise, labels


def main(replicator, steps=40):
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = replicator.wrap_optimizer(optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    for images, labels in replicator.inputs(batches(steps, seed=1)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    images, labels = next(batches(1, seed=2))
    right = (model(images).argmax(1) == labels).float().mean()
    print(f"loss {loss.item():.3f}, {right.item():.0%} right on images it has not seen")
    return [p.detach() for p in model.parameters()]


if __name__ == "__main__":
    murmurate.run(main, replicas=4, strategy="all-reduce")
