"""One loop of a script, plain or with its optimizer wrapped, under each optimizer of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replicator.steps import tanh_net

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def two_groups(net):
    """The head first, at a rate of its own; the rest with weight decay."""
    return [
        {"params": list(net[2].parameters()), "lr": 0.03},
        {"params": net[0].parameters(), "weight_decay": 0.02},
    ]


def script(optimizer, wrap, batches, groups=False, scheduled=False, net=None):
    """The same loop, plain or wrapped: all parameters after every step."""
    net = tanh_net() if net is None else net
    made = OPTIMIZERS[optimizer](two_groups(net) if groups else net.parameters())
    made = wrap(made, net)
    scheduler = torch.optim.lr_scheduler.StepLR(made, step_size=3, gamma=0.5) if scheduled else None
    path = []
    for x, y in batches:
        made.zero_grad()
        F.mse_loss(net(x), y).backward()
        made.step()
        if scheduler is not None:
            scheduler.step()
        path.append([p.detach().clone() for p in net.parameters()])
    return path


def plain(optimizer, module):
    return optimizer


def same_bits(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)
