"""What every fabric must do, whatever it is made of.

A fabric is a module in ``murmurate/fabric`` with ``run_members(size, functions, deadline_seconds)``: it
runs one function a member, gives each its ``Fabric`` and returns their results by rank. The functions are in
``fabric_roles.py`` and ``message_roles.py``, at module level, so that they can be sent to processes.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch

from conformance.fabric_roles import (
    N,
    broadcast_from_each,
    fail_as_rank_one,
    found,
    gather_and_change,
    look_around,
    many_rounds,
    mean_a_parameter,
    mean_twice,
    mean_whole_numbers,
    share_and_write,
    silent_in_mean,
    two_channels,
    use_what_is_missing,
    vector,
)
from conformance.message_roles import (
    SHORT,
    any_bits,
    ask_for_ranks_that_do_not_exist,
    flood,
    hold_what_was_peeked,
    keep_all_letters,
    peek_too_early,
    publish_and_follow,
    publish_on_and_on,
    publish_when_told,
    publish_wide_ones,
    read_after_the_flood,
    read_wide_ones,
    receive_after_the_change,
    receive_numbers,
    receive_shorter_ones,
    send_many,
    send_numbers,
    send_shorter_ones,
    send_what_changes,
    wait_for_newer,
)
from murmurate.fabric import fabrics

_SILENCE = 0.3  # the deadline of tests in which somebody keeps silent


@pytest.fixture(params=found())
def members(request):
    """(size, one function for all or one each) -> results by rank."""
    fabric = fabrics()[request.param]

    def run(size, *functions, **options):
        return fabric.run_members(size, list(functions) * (size // len(functions)), **options)

    return run


def test_the_folder_has_the_fabrics_of_the_design():
    assert {"network", "processes", "simulated"} <= set(found())


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
