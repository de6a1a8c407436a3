"""A lower bound of A2C's cost on one core: its simulators and network passes, and nothing else.

``python -m murmurate.bench._limit`` prints torch's version, then answers each line of its input with a line
of JSON: the CPU seconds of one call of each part, by network and part, each measured in a short window. The
parts are a vector step of 16 games, the forward pass of 16 frames that chooses actions, the forward and
backward pass of the 80 frames that are learned from, and the forward pass of 16 frames that are bootstrapped
from. There is no optimizer, loss, return, sampling, copying or recording.

The network is the plain Nature-2013 stack of torch modules in channels-last order, in float32 and in
bfloat16, and, as ``own``, the package's network. All take frames as simulators return them (uint8,
row-major); ``widened`` is the plain stack on frames that are already in its dtype and memory format, which
shows what that conversion costs.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from murmurate.launch.role import prepare_process

SIMULATORS, STEPS, ACTIONS = 16, 5, 6
_WINDOW_SECONDS = 0.1  # CPU seconds for which each part is called

Part = Callable[[], Any]


class PlainNature(nn.Module):
    """The Nature-2013 stack with its two heads in plain torch modules."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.torso = nn.Sequential(
            nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * 9 * 9, 256), nn.ReLU(),
        )  # fmt: skip
        self.heads = nn.Linear(256, ACTIONS + 1)
        self.to(dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def widen(self, frames: Tensor) -> Tensor:
        # the layout is changed first, while a pixel is one byte, which is the faster order of these two calls
        return frames.contiguous(memory_format=torch.channels_last).to(self.dtype).mul_(1 / 255)

    def heads_of(self, widened: Tensor) -> Tensor:
        heads: Tensor = self.heads(self.torso(widened))
        return heads

    def forward(self, frames: Tensor) -> Tensor:
        return self.heads_of(self.widen(frames))


def parts() -> dict[str, dict[str, Part]]:
    """The calls that are timed, by network and part."""
    generator = torch.Generator().manual_seed(0)
    few, many = (
        torch.randint(0, 256, (count, 4, 84, 84), dtype=torch.uint8, generator=generator)
        for count in (SIMULATORS, SIMULATORS * STEPS)
    )
    # the simulator is the only part of "games", which is not a network
    networks: dict[str, dict[str, Part]] = {"games": {"simulator": simulator(generator)}}
    for label, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        plain = PlainNature(dtype)
        weights = list(plain.parameters())
        networks[label] = passes(plain, weights, few, many)
        networks[f"widened {label}"] = passes(plain.heads_of, weights, plain.widen(few), plain.widen(many))
        own_forward, parameters = own_net(label)
        networks[f"own {label}"] = passes(own_forward, parameters, few, many)
    return networks


def passes(
    net: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], few: Tensor, many: Tensor
) -> dict[str, Part]:
    def forward() -> Tensor:
        with torch.no_grad():
            return net(few)

    def learn() -> None:
        for parameter in parameters:
            parameter.grad = None
        net(many).float().square().mean().backward()  # type: ignore[no-untyped-call]

    return {"acting": forward, "learning": learn, "bootstrap": forward}


def own_net(precision: str) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:
    """The recipe's net as its agent builds it, and its parameters."""
    from murmurate.agents.a2c import A2C
    from murmurate.replica.vector import Replica
    from murmurate.replicator.learner import Context
    from murmurate.spec import EnvSpec

    spec = EnvSpec("pong", (4, 84, 84), torch.uint8, ACTIONS)
    config = A2C(precision="bfloat16" if precision == "bfloat16" else "float32")
    net = config.build(Context(spec, Replica, seed=0)).net

    def heads(frames: Tensor) -> Tensor:
        policy, value = net(frames)
        return torch.cat([policy, value[:, None]], 1)

    return heads, list(net.parameters())


def simulator(generator: torch.Generator) -> Part:
    """A vector step of Pong with random actions, in the recipe's preprocessing."""
    from murmurate.worlds.atari import AtariWorld

    games = AtariWorld("pong").vector(SIMULATORS, 1, life_loss=True)
    games.reset(seed=0)
    actions = torch.randint(0, ACTIONS, (512, SIMULATORS), generator=generator).numpy()
    endless_actions = itertools.cycle(actions)

    def step() -> None:
        games.send(next(endless_actions))
        games.recv()

    return step


def window(part: Part) -> float:
    """CPU seconds of one call, the mean over a window of many."""
    start = time.process_time()
    for calls in itertools.count(1):
        part()
        spent = time.process_time() - start
        if spent >= _WINDOW_SECONDS:
            return spent / calls
    raise AssertionError


def limit(fastest: dict[str, float], simulator_seconds: float) -> tuple[float, dict[str, float]]:
    """(env steps per CPU second, CPU seconds of each part per env step).

    fastest, simulator_seconds: seconds of one call of each of a network's parts, and of the simulator.
    """
    per_env_step = {
        "simulator": simulator_seconds / SIMULATORS,
        "acting": fastest["acting"] / SIMULATORS,
        "learning": fastest["learning"] / (SIMULATORS * STEPS),
        "bootstrap": fastest["bootstrap"] / (SIMULATORS * STEPS),
    }
    return 1 / sum(per_env_step.values()), per_env_step


def main() -> None:
    prepare_process(1)  # as learners do
    networks = parts()
    for net in networks.values():
        for part in net.values():
            part()
    print(json.dumps({"version": torch.__version__}), flush=True)
    for _ in sys.stdin:
        answer = {
            net: {name: window(part) for name, part in calls.items()} for net, calls in networks.items()
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
