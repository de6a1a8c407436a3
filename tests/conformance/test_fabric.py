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


def channel(door, name="model", like=None):
    return door.channel(name, torch.zeros(N) if like is None else like)


def look_around(door):
    fabric = channel(door)
    return door.rank, door.size, fabric.rank, fabric.size, list(fabric.living()), list(door.living())


def mean_twice(door):
    fabric, results = channel(door), []
    for salt in range(2):
        x = vector(door.rank, salt)
        results.append((fabric.mean_(x), x))
    return results


def mean_whole_numbers(door):
    fabric = channel(door)
    x = torch.arange(N, dtype=torch.float32) * (door.rank + 1)
    fabric.mean_(x)
    return x


def mean_a_parameter(door):
    x = torch.nn.Parameter(vector(door.rank))
    place = x.data_ptr()
    channel(door).mean_(x)
    return x.detach().clone(), x.data_ptr() == place


def broadcast_from_each(door):
    fabric, results = channel(door), []
    for root in range(door.size):
        x = vector(door.rank, salt=root)
        fabric.broadcast_(x, root)
        results.append(x)
    return results


def gather_and_change(door):
    fabric = channel(door)
    x = vector(door.rank)
    gathered = fabric.gather(x)
    x.fill_(-1.0)
    kept = {rank: theirs.clone() for rank, theirs in gathered.items()}
    for theirs in gathered.values():
        theirs += 1 + door.rank
    fabric.mean_(x)  # all have written into theirs by now
    return kept, {rank: theirs.clone() for rank, theirs in gathered.items()}


def many_rounds(door):
    """Mixed collectives: nobody may overtake into another's round."""
    fabric, results = channel(door), []
    for turn in range(40):
        x = torch.full((N,), float(turn * 100 + door.rank))
        if turn % 3 == 0:
            fabric.mean_(x)
        elif turn % 3 == 1:
            fabric.broadcast_(x, turn % door.size)
        else:
            x = sum(fabric.gather(x).values())
        results.append(float(x[0]))
    return results


def two_channels(door):
    one, other = channel(door, "actor"), channel(door, "critic", torch.zeros(3))
    one.publish(torch.full((N,), 1.0 + door.rank))
    other.publish(torch.full((3,), -1.0 - door.rank))
    x, y = torch.full((N,), float(door.rank)), torch.full((3,), 10.0 * door.rank)
    one.mean_(x)
    other.mean_(y)
    return x, y, one.peek(0)[0].clone(), other.peek(0)[0].clone()


def silent_in_mean(door):
    fabric, last = channel(door), door.size - 1
    if door.rank == last:  # lives until all others have given up
        return [fabric.wait("gave up", 60.0) is not None for _ in range(last)]
    others = [rank for rank in range(last) if rank != door.rank]
    for other in others:
        fabric.send(other, "about to call", vector(door.rank), deadline_seconds=60.0)
    for _ in others:
        assert fabric.wait("about to call", 60.0) is not None
    try:
        fabric.mean_(vector(door.rank))
    except FabricError as error:
        fabric.send(last, "gave up", vector(door.rank))
        return str(error)
    return "no error"


def send_numbers(count, door):
    fabric = channel(door)
    accepted = [
        fabric.send(0, tag, torch.full((N,), float(number)), note=2.0**53 - number)
        for number in range(count)
        for tag in ("odd", "even")[number % 2 :]
    ]
    return accepted


def receive_numbers(count, door):
    fabric, streams = channel(door), {}
    for tag in ("even", "odd"):
        expected = count if tag == "even" else (count + 1) // 2
        for _ in range(expected * (door.size - 1)):
            sender, x, note = fabric.wait(tag, 30.0)
            assert bool((x == x[0]).all())
            assert note == 2.0**53 - float(x[0])
            streams.setdefault((sender, tag), []).append(float(x[0]))
    return streams, fabric.receive("even"), fabric.wait("odd", 0.02), fabric.receive("unheard")


def send_what_changes(door):
    fabric = channel(door)
    x = vector(7)
    fabric.send(1, "x", x)
    x.fill_(0.0)
    fabric.broadcast_(x, 0)


def receive_after_the_change(door):
    fabric = channel(door)
    fabric.broadcast_(torch.zeros(N), 0)
    return fabric.wait("x", 30.0)


SHORT = (1, N - 1, N, 3)


def any_bits(count):
    """Numbers whose bits mean something else: NaNs with a load, denormals, whole numbers."""
    return torch.arange(1, count + 1, dtype=torch.int32).mul_(0x7FE00001 // 3).view(torch.float32)


def send_shorter_ones(door):
    fabric = channel(door)
    for count in SHORT:
        fabric.send(1, "x", any_bits(count), note=count)


def receive_shorter_ones(door):
    fabric = channel(door)
    messages = [fabric.wait("x", 20.0) for _ in SHORT]
    return [(message.note, message.x.view(torch.int32).tolist()) for message in messages]


def send_many(count, door):
    fabric = channel(door)
    for number in range(count):
        assert fabric.send(1, "kept", torch.full((N,), float(number)))
    fabric.mean_(torch.zeros(N))


def keep_all_letters(count, door):
    """Keeps them all, writes into each, and says what each holds once the last has come."""
    fabric = channel(door)
    kept = []
    while len(kept) < count:
        message = fabric.wait("kept", 30.0)
        message.x.add_(1000.0)
        kept.append(message.x)
    fabric.mean_(torch.zeros(N))
    return [x.unique().tolist() for x in kept]


def flood(door):
    """Send until refused, then publish how many were taken, whereupon rank 1 begins to read."""
    fabric = channel(door)
    taken = 0
    while fabric.send(1, "flood", torch.full((N,), float(taken))):
        taken += 1
        if taken > 5000:
            return "unbounded"
    fabric.publish(torch.full((N,), float(taken)))
    return taken


def read_after_the_flood(door):
    fabric = channel(door)
    fabric.wait_newer([0], [0], 30.0)
    taken = fabric.peek(0)[0].clone()
    numbers = []
    while (message := fabric.receive("flood")) is not None:
        numbers.append(float(message[1][0]))
    return int(taken[0]), numbers


def ask_for_ranks_that_do_not_exist(door):
    fabric = channel(door)
    for rank in (-1, door.size):
        for verb in (fabric.version, fabric.peek):
            with pytest.raises(ValueError, match=f"no rank {rank}"):
                verb(rank)
    fabric.mean_(torch.zeros(N))  # nobody ends while another asks


def peek_too_early(door):
    fabric = channel(door)
    before = fabric.version(1)
    try:
        fabric.peek(1)
        error = "none"
    except FabricError as caught:
        error = str(caught)
    fabric.mean_(torch.zeros(N))
    return before, error


def publish_and_follow(door):
    """Everybody publishes vectors that tell version and rank in each place, and reads all others'."""
    fabric, fresh = channel(door), True
    seen = [0] * door.size
    returned = []
    for version in range(1, 61):
        returned.append(fabric.publish(torch.full((N,), 1000.0 * door.rank + version)))
        for peer in range(door.size):
            if fabric.version(peer) == 0:
                continue
            x, newest = fabric.peek(peer)
            fresh = fresh and newest >= seen[peer] and bool((x == 1000.0 * peer + newest).all())
            seen[peer] = newest
    fabric.mean_(torch.zeros(N))  # all have published their last
    last = [fabric.peek(peer)[1] for peer in range(door.size)]
    return returned, fresh, last, fabric.peek(door.rank)[1]


def publish_on_and_on(door):
    fabric = channel(door)
    x = vector(0)
    fabric.publish(x)
    fabric.mean_(torch.zeros(N))
    fabric.mean_(torch.zeros(N))  # the reader has peeked
    for version in range(2, 40):
        x.fill_(float(version))
        fabric.publish(x)
    fabric.mean_(torch.zeros(N))


WIDE = 300_000


def publish_wide_ones(door):
    fabric, x = door.channel("wide", torch.zeros(WIDE)), torch.zeros(WIDE)
    for version in range(1, 60):
        fabric.publish(x.fill_(version))
    fabric.wait("read", 60.0)


def read_wide_ones(door):
    fabric, newest, looked = door.channel("wide", torch.zeros(WIDE)), 0, 0
    while newest < 59:
        fabric.wait_newer([0], [newest], 60.0)
        x, newest = fabric.peek(0)
        low, high = torch.aminmax(x)
        assert float(low) == float(high) == newest
        looked += 1
    fabric.send(0, "read", torch.zeros(1))
    return looked


def hold_what_was_peeked(door):
    fabric = channel(door)
    fabric.mean_(torch.zeros(N))
    theirs, version = fabric.peek(0)
    at_first = theirs.clone()
    fabric.mean_(torch.zeros(N))
    fabric.mean_(torch.zeros(N))  # 38 more versions are out
    held = theirs.clone()
    newest, newest_version = fabric.peek(0)
    return version, at_first, held, newest.clone(), newest_version


def publish_when_told(door):
    fabric = channel(door)
    fabric.publish(torch.zeros(N))
    fabric.wait("go", 30.0)
    fabric.publish(torch.ones(N))


def wait_for_newer(door):
    fabric = channel(door)
    first = fabric.wait_newer([1, 2], [0, 0], 30.0)
    in_vain = fabric.wait_newer([1, 2], [1, 1], 0.05)
    fabric.send(1, "go", torch.zeros(N))
    half = fabric.wait_newer([1, 2], [1, 1], 0.05), fabric.wait_newer([1], [1], 30.0)
    fabric.send(2, "go", torch.zeros(N))
    both = fabric.wait_newer([1, 2], [1, 1], 30.0)
    return first, in_vain, half, both, fabric.wait_newer([], [], 0.0)


def share_and_write(door):
    fabric = channel(door)
    if Capability.SHARED_MEMORY not in fabric.capabilities:
        return None  # that it says so is tested with the other capabilities
    memory = fabric.shared("params", vector(door.rank))
    at_first = memory.clone()
    fabric.mean_(torch.zeros(N))  # all have looked
    memory[door.rank] = 100.0 + door.rank
    fabric.mean_(torch.zeros(N))  # all have written
    again = fabric.shared("params", torch.zeros(N))
    other = fabric.shared("counter", torch.full((2,), float(door.rank), dtype=torch.float64))
    return at_first, memory.clone(), again.clone(), other.clone()


def use_what_is_missing(door):
    """By capability: whether it is claimed, and whether its verbs raise FabricError."""
    fabric = channel(door)
    verbs = {
        Capability.COLLECTIVE: [lambda: fabric.mean_(torch.zeros(N)), lambda: fabric.gather(torch.zeros(N))],
        Capability.MAIL: [lambda: fabric.send(door.rank, "t", torch.zeros(N)), lambda: fabric.receive("t")],
        Capability.REGISTER: [lambda: fabric.publish(torch.zeros(N)), lambda: fabric.version(0)],
        Capability.SHARED_MEMORY: [lambda: fabric.shared("k", torch.zeros(N))],
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
        outcome[capability] = (capability in fabric.capabilities, works)
    return outcome, fabric.capabilities <= door.capabilities


def fail_as_rank_one(door):
    if door.rank == 1:
        raise KeyError("the role's own mistake")
    return door.rank


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
