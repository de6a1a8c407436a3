"""What members do in the tests of every fabric's messages and published vectors."""

from __future__ import annotations

import pytest
import torch

from conformance.fabric_roles import N, open_channel, vector
from murmurate.fabric.interface import FabricError


def send_numbers(count, fabric):
    channel = open_channel(fabric)
    accepted = [
        channel.send(0, tag, torch.full((N,), float(number)), note=2.0**53 - number)
        for number in range(count)
        for tag in ("odd", "even")[number % 2 :]
    ]
    return accepted


def receive_numbers(count, fabric):
    channel, streams = open_channel(fabric), {}
    for tag in ("even", "odd"):
        expected = count if tag == "even" else (count + 1) // 2
        for _ in range(expected * (fabric.size - 1)):
            sender, x, note = channel.wait(tag, 30.0)
            assert bool((x == x[0]).all())
            assert note == 2.0**53 - float(x[0])
            streams.setdefault((sender, tag), []).append(float(x[0]))
    return streams, channel.receive("even"), channel.wait("odd", 0.02), channel.receive("unheard")


def send_what_changes(fabric):
    channel = open_channel(fabric)
    x = vector(7)
    channel.send(1, "x", x)
    x.fill_(0.0)
    channel.broadcast_(x, 0)


def receive_after_the_change(fabric):
    channel = open_channel(fabric)
    channel.broadcast_(torch.zeros(N), 0)
    return channel.wait("x", 30.0)


SHORT = (1, N - 1, N, 3)


def any_bits(count):
    """Numbers whose bits mean something else: NaNs with a load, denormals, whole numbers."""
    return torch.arange(1, count + 1, dtype=torch.int32).mul_(0x7FE00001 // 3).view(torch.float32)


def send_shorter_ones(fabric):
    channel = open_channel(fabric)
    for count in SHORT:
        channel.send(1, "x", any_bits(count), note=count)


def receive_shorter_ones(fabric):
    channel = open_channel(fabric)
    messages = [channel.wait("x", 20.0) for _ in SHORT]
    return [(message.note, message.x.view(torch.int32).tolist()) for message in messages]


def send_many(count, fabric):
    channel = open_channel(fabric)
    for number in range(count):
        assert channel.send(1, "kept", torch.full((N,), float(number)))
    channel.mean_(torch.zeros(N))


def keep_all_letters(count, fabric):
    """Keeps them all, writes into each, and says what each holds once the last has come."""
    channel = open_channel(fabric)
    kept = []
    while len(kept) < count:
        message = channel.wait("kept", 30.0)
        message.x.add_(1000.0)
        kept.append(message.x)
    channel.mean_(torch.zeros(N))
    return [x.unique().tolist() for x in kept]


def flood(fabric):
    """Send until refused, then publish how many were taken, whereupon rank 1 begins to read."""
    channel = open_channel(fabric)
    taken = 0
    while channel.send(1, "flood", torch.full((N,), float(taken))):
        taken += 1
        if taken > 5000:
            return "unbounded"
    channel.publish(torch.full((N,), float(taken)))
    return taken


def read_after_the_flood(fabric):
    channel = open_channel(fabric)
    channel.wait_newer([0], [0], 30.0)
    taken = channel.peek(0)[0].clone()
    numbers = []
    while (message := channel.receive("flood")) is not None:
        numbers.append(float(message[1][0]))
    return int(taken[0]), numbers


def ask_for_ranks_that_do_not_exist(fabric):
    channel = open_channel(fabric)
    for rank in (-1, fabric.size):
        for verb in (channel.version, channel.peek):
            with pytest.raises(ValueError, match=f"no rank {rank}"):
                verb(rank)
    channel.mean_(torch.zeros(N))  # nobody ends while another asks


def peek_too_early(fabric):
    channel = open_channel(fabric)
    before = channel.version(1)
    try:
        channel.peek(1)
        error = "none"
    except FabricError as caught:
        error = str(caught)
    channel.mean_(torch.zeros(N))
    return before, error


def publish_and_follow(fabric):
    """Everybody publishes vectors that tell version and rank in each place, and reads all others'."""
    channel, fresh = open_channel(fabric), True
    seen = [0] * fabric.size
    returned = []
    for version in range(1, 61):
        returned.append(channel.publish(torch.full((N,), 1000.0 * fabric.rank + version)))
        for peer in range(fabric.size):
            if channel.version(peer) == 0:
                continue
            x, newest = channel.peek(peer)
            fresh = fresh and newest >= seen[peer] and bool((x == 1000.0 * peer + newest).all())
            seen[peer] = newest
    channel.mean_(torch.zeros(N))  # all have published their last
    last = [channel.peek(peer)[1] for peer in range(fabric.size)]
    return returned, fresh, last, channel.peek(fabric.rank)[1]


def publish_on_and_on(fabric):
    channel = open_channel(fabric)
    x = vector(0)
    channel.publish(x)
    channel.mean_(torch.zeros(N))
    channel.mean_(torch.zeros(N))  # the reader has peeked
    for version in range(2, 40):
        x.fill_(float(version))
        channel.publish(x)
    channel.mean_(torch.zeros(N))


WIDE = 300_000


def publish_wide_ones(fabric):
    channel, x = fabric.channel("wide", torch.zeros(WIDE)), torch.zeros(WIDE)
    for version in range(1, 60):
        channel.publish(x.fill_(version))
    channel.wait("read", 60.0)


def read_wide_ones(fabric):
    channel, newest, looked = fabric.channel("wide", torch.zeros(WIDE)), 0, 0
    while newest < 59:
        channel.wait_newer([0], [newest], 60.0)
        x, newest = channel.peek(0)
        low, high = torch.aminmax(x)
        assert float(low) == float(high) == newest
        looked += 1
    channel.send(0, "read", torch.zeros(1))
    return looked


def hold_what_was_peeked(fabric):
    channel = open_channel(fabric)
    channel.mean_(torch.zeros(N))
    theirs, version = channel.peek(0)
    at_first = theirs.clone()
    channel.mean_(torch.zeros(N))
    channel.mean_(torch.zeros(N))  # 38 more versions are out
    held = theirs.clone()
    newest, newest_version = channel.peek(0)
    return version, at_first, held, newest.clone(), newest_version


def publish_when_told(fabric):
    channel = open_channel(fabric)
    channel.publish(torch.zeros(N))
    channel.wait("go", 30.0)
    channel.publish(torch.ones(N))


def wait_for_newer(fabric):
    channel = open_channel(fabric)
    first = channel.wait_newer([1, 2], [0, 0], 30.0)
    in_vain = channel.wait_newer([1, 2], [1, 1], 0.05)
    channel.send(1, "go", torch.zeros(N))
    half = channel.wait_newer([1, 2], [1, 1], 0.05), channel.wait_newer([1], [1], 30.0)
    channel.send(2, "go", torch.zeros(N))
    both = channel.wait_newer([1, 2], [1, 1], 30.0)
    return first, in_vain, half, both, channel.wait_newer([], [], 0.0)
