"""What members do in the tests of every fabric: collectives, shared memory, errors. Rank r has vector(r)."""

from __future__ import annotations

import torch

from murmurate.fabric import fabrics
from murmurate.fabric.interface import Capability, FabricError

N = 7


def found() -> list[str]:
    return sorted(fabrics())


def vector(rank: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * salt + rank))


def open_channel(fabric, name="model", like=None):
    return fabric.channel(name, torch.zeros(N) if like is None else like)


def look_around(fabric):
    channel = open_channel(fabric)
    return fabric.rank, fabric.size, channel.rank, channel.size, list(channel.living()), list(fabric.living())


def mean_twice(fabric):
    channel, results = open_channel(fabric), []
    for salt in range(2):
        x = vector(fabric.rank, salt)
        results.append((channel.mean_(x), x))
    return results


def mean_whole_numbers(fabric):
    channel = open_channel(fabric)
    x = torch.arange(N, dtype=torch.float32) * (fabric.rank + 1)
    channel.mean_(x)
    return x


def mean_a_parameter(fabric):
    x = torch.nn.Parameter(vector(fabric.rank))
    place = x.data_ptr()
    open_channel(fabric).mean_(x)
    return x.detach().clone(), x.data_ptr() == place


def broadcast_from_each(fabric):
    channel, results = open_channel(fabric), []
    for root in range(fabric.size):
        x = vector(fabric.rank, salt=root)
        channel.broadcast_(x, root)
        results.append(x)
    return results


def gather_and_change(fabric):
    channel = open_channel(fabric)
    x = vector(fabric.rank)
    gathered = channel.gather(x)
    x.fill_(-1.0)
    kept = {rank: theirs.clone() for rank, theirs in gathered.items()}
    for theirs in gathered.values():
        theirs += 1 + fabric.rank
    channel.mean_(x)  # all have written into theirs by now
    return kept, {rank: theirs.clone() for rank, theirs in gathered.items()}


def many_rounds(fabric):
    """Mixed collectives: nobody may overtake into another's round."""
    channel, results = open_channel(fabric), []
    for turn in range(40):
        x = torch.full((N,), float(turn * 100 + fabric.rank))
        if turn % 3 == 0:
            channel.mean_(x)
        elif turn % 3 == 1:
            channel.broadcast_(x, turn % fabric.size)
        else:
            x = sum(channel.gather(x).values())
        results.append(float(x[0]))
    return results


def two_channels(fabric):
    one, other = open_channel(fabric, "actor"), open_channel(fabric, "critic", torch.zeros(3))
    one.publish(torch.full((N,), 1.0 + fabric.rank))
    other.publish(torch.full((3,), -1.0 - fabric.rank))
    x, y = torch.full((N,), float(fabric.rank)), torch.full((3,), 10.0 * fabric.rank)
    one.mean_(x)
    other.mean_(y)
    return x, y, one.peek(0)[0].clone(), other.peek(0)[0].clone()


def silent_in_mean(fabric):
    channel, last = open_channel(fabric), fabric.size - 1
    if fabric.rank == last:  # lives until all others have given up
        return [channel.wait("gave up", 60.0) is not None for _ in range(last)]
    others = [rank for rank in range(last) if rank != fabric.rank]
    for other in others:
        channel.send(other, "about to call", vector(fabric.rank), deadline_seconds=60.0)
    for _ in others:
        assert channel.wait("about to call", 60.0) is not None
    try:
        channel.mean_(vector(fabric.rank))
    except FabricError as error:
        channel.send(last, "gave up", vector(fabric.rank))
        return str(error)
    return "no error"


def share_and_write(fabric):
    channel = open_channel(fabric)
    if Capability.SHARED_MEMORY not in channel.capabilities:
        return None  # that it says so is tested with the other capabilities
    memory = channel.shared("params", vector(fabric.rank))
    at_first = memory.clone()
    channel.mean_(torch.zeros(N))  # all have looked
    memory[fabric.rank] = 100.0 + fabric.rank
    channel.mean_(torch.zeros(N))  # all have written
    again = channel.shared("params", torch.zeros(N))
    other = channel.shared("counter", torch.full((2,), float(fabric.rank), dtype=torch.float64))
    return at_first, memory.clone(), again.clone(), other.clone()


def use_what_is_missing(fabric):
    """By capability: whether it is claimed, and whether its verbs raise FabricError."""
    channel, zeros = open_channel(fabric), torch.zeros(N)
    verbs = {
        Capability.COLLECTIVE: [
            lambda: channel.mean_(torch.zeros(N)),
            lambda: channel.gather(torch.zeros(N)),
        ],
        Capability.MAIL: [
            lambda: channel.send(fabric.rank, "t", torch.zeros(N)),
            lambda: channel.receive("t"),
        ],
        Capability.REGISTER: [lambda: channel.publish(zeros), lambda: channel.version(0)],
        Capability.SHARED_MEMORY: [lambda: channel.shared("k", zeros)],
    }
    outcome = {}
    for capability, calls in verbs.items():
        works = []
        for call in calls:
            try:
                call()
                works.append(True)
            except FabricError:
                works.append(False)
        outcome[capability] = (capability in channel.capabilities, works)
    return outcome, channel.capabilities <= fabric.capabilities


def fail_as_rank_one(fabric):
    if fabric.rank == 1:
        raise KeyError("the role's own mistake")
    return fabric.rank
