"""What every fabric must do, whatever it is made of.

A fabric is a module in ``murmurate/fabric`` with ``run_members(size, functions, deadline_seconds)``: it
runs one function a member, gives each its ``Fabric`` and returns their results by rank. The
functions live at module level, so that they can be sent to processes.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch

from murmurate.fabric import fabrics
from murmurate.fabric.interface import Capability, FabricError

N = 7
_SILENCE = 0.3  # the deadline of tests in which somebody keeps silent


def found() -> list[str]:
    return sorted(fabrics())


@pytest.fixture(params=found())
def members(request):
    """(size, one function for all or one each) -> results by rank."""
    fabric = fabrics()[request.param]

    def run(size, *functions, **options):
        return fabric.run_members(size, list(functions) * (size // len(functions)), **options)

    return run


def test_the_folder_has_the_fabrics_of_the_design():
    assert {"network", "processes", "simulated"} <= set(found())


# -- what members do: rank r has vector(r) --------------------------------------------------------


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


# -- what must come of it -------------------------------------------------------------------------


class TestEveryFabric:
    @pytest.mark.parametrize("size", [1, 3])
    def test_members_know_who_they_are(self, members, size):
        every = list(range(size))
        assert members(size, look_around) == [(r, size, r, size, every, every) for r in range(size)]

    def test_mean_is_the_mean_and_bitwise_the_same_everywhere(self, members):
        """Of three; test_fabric_groups.py has those of one, two and four."""
        size = 3
        results = members(size, mean_twice)
        for salt in range(2):
            counts, means = zip(*(result[salt] for result in results), strict=True)
            assert counts == (size,) * size
            exact = torch.stack([vector(r, salt) for r in range(size)]).double().mean(0)
            torch.testing.assert_close(means[0].double(), exact, rtol=0, atol=4e-7)
            assert all(torch.equal(mean, means[0]) for mean in means)

    def test_mean_of_whole_numbers_is_exact(self, members):
        for x in members(4, mean_whole_numbers):
            assert torch.equal(x, torch.arange(N, dtype=torch.float32) * 2.5)

    def test_mean_with_one_is_the_identity_bit_for_bit(self, members):
        ((count, x), _) = members(1, mean_twice)[0]
        assert count == 1
        assert torch.equal(x, vector(0))

    def test_mean_writes_into_a_parameter_in_place(self, members):
        (one, kept), (other, kept_too) = members(2, mean_a_parameter)
        assert kept
        assert kept_too
        assert torch.equal(one, other)

    def test_broadcast_gives_everybody_the_roots(self, members):
        for received in members(3, broadcast_from_each):
            for root, x in enumerate(received):
                assert torch.equal(x, vector(root, salt=root))

    def test_gather_gives_copies_by_rank(self, members):
        for rank, (before, after) in enumerate(members(3, gather_and_change)):
            assert sorted(before) == [0, 1, 2]
            assert all(torch.equal(before[r], vector(r)) for r in range(3))
            assert all(torch.equal(after[r], vector(r) + (1 + rank)) for r in range(3))

    def test_rounds_are_matched_in_number(self, members):
        size = 3
        expected = [
            (turn * 100 + 1.0, turn * 100.0 + turn % size, turn * 300 + 3.0)[turn % 3] for turn in range(40)
        ]
        assert members(size, many_rounds) == [expected] * size

    def test_channels_do_not_mix(self, members):
        for x, y, actor, critic in members(3, two_channels):
            assert torch.equal(x, torch.full((N,), 1.0))
            assert torch.equal(y, torch.full((3,), 10.0))
            assert torch.equal(actor, torch.full((N,), 1.0))
            assert torch.equal(critic, torch.full((3,), -1.0))

    def test_a_silent_member_is_named_at_the_deadline(self, members):
        *waiting, silent = members(3, silent_in_mean, deadline_seconds=3 * _SILENCE)
        assert silent == [True, True]
        for message in waiting:  # who was held up until the other had given up is missed too
            (named,) = re.findall(r"\[([\d, ]+)\]", message)
            assert "2" in named.split(", ")

    def test_mail_arrives_once_each_in_the_senders_order(self, members):
        count = 25
        send, receive = functools.partial(send_numbers, count), functools.partial(receive_numbers, count)
        (streams, *nothing), *sent = members(3, receive, send, send)
        assert all(all(accepted) for accepted in sent)
        assert nothing == [None, None, None]
        for sender in (1, 2):
            assert streams[sender, "even"] == [float(i) for i in range(count)]
            assert streams[sender, "odd"] == [float(i) for i in range(0, count, 2)]

    def test_mail_is_a_copy(self, members):
        _, (sender, x, _) = members(2, send_what_changes, receive_after_the_change)
        assert sender == 0
        assert torch.equal(x, vector(7))

    def test_shorter_letters_arrive_as_they_are(self, members):
        _, messages = members(2, send_shorter_ones, receive_shorter_ones)
        assert messages == [(count, any_bits(count).view(torch.int32).tolist()) for count in SHORT]

    def test_letters_are_the_receivers_to_keep_and_stop_no_sender(self, members):
        count = 40
        _, kept = members(2, functools.partial(send_many, count), functools.partial(keep_all_letters, count))
        assert kept == [[1000.0 + number] for number in range(count)]

    def test_mail_is_bounded_and_what_was_taken_arrives(self, members):
        taken, (told, numbers) = members(2, flood, read_after_the_flood, deadline_seconds=_SILENCE)
        assert taken == told > 0
        assert numbers == [float(i) for i in range(taken)]

    def test_a_register_of_no_rank_is_an_error(self, members):
        members(2, ask_for_ranks_that_do_not_exist)

    def test_a_peek_before_the_first_publish_is_an_error_naming_the_peer(self, members):
        for before, error in members(2, peek_too_early):
            assert before == 0
            assert "rank 1" in error.lower()

    def test_versions_count_up_and_the_newest_wins_whole(self, members):
        size = 3
        for returned, fresh, last, own in members(size, publish_and_follow):
            assert returned == list(range(1, 61))
            assert fresh
            assert last == [60] * size
            assert own == 60

    def test_a_peeked_vector_stays_while_its_publisher_goes_on(self, members):
        _, (version, at_first, held, newest, newest_version) = members(
            2, publish_on_and_on, hold_what_was_peeked
        )
        assert version == 1
        assert torch.equal(at_first, vector(0))
        assert torch.equal(held, vector(0))
        assert newest_version == 39
        assert torch.equal(newest, torch.full((N,), 39.0))

    def test_no_reader_ever_sees_a_torn_vector(self, members):
        assert members(2, publish_wide_ones, read_wide_ones)[1] > 0

    def test_waiting_for_news_ends_with_them_or_at_the_deadline(self, members):
        waited = members(3, wait_for_newer, publish_when_told, publish_when_told)[0]
        assert waited == (True, False, (False, True), True, True)

    def test_shared_memory_starts_with_the_lowest_and_is_seen_by_all(self, members):
        results = members(3, share_and_write)
        if results == [None] * 3:
            pytest.skip("this fabric offers no shared memory")
        for at_first, memory, again, other in results:
            assert torch.equal(at_first, vector(0))
            expected = vector(0)
            expected[:3] = torch.tensor([100.0, 101.0, 102.0])
            assert torch.equal(memory, expected)
            assert torch.equal(again, expected)
            assert torch.equal(other, torch.zeros(2, dtype=torch.float64))

    def test_capabilities_are_honest(self, members):
        (outcome, within) = members(1, use_what_is_missing)[0]
        assert within
        for capability, (claimed, works) in outcome.items():
            assert works == [claimed] * len(works), capability

    def test_a_roles_own_error_comes_out(self, members):
        with pytest.raises(KeyError, match="own mistake"):
            members(3, fail_as_rank_one)
