"""Markers of members that die, end and are replaced."""

from __future__ import annotations

import torch

from murmurate.strategies.checkpoint_barrier import CheckpointBarrier
from murmurate.strategies.interface import FINAL_DRAIN, MemberEvent
from strategies.scripted_mail import MailScript

PARAMETERS = 3


def barrier_with(marker: int, *events: str) -> bool:
    """Whether a member whose peer sent ``marker``, and then had ``events``, drains checkpoint 7 at once."""
    script = MailScript(2)
    sender, member = script.member(1), script.member(0)
    one, other = CheckpointBarrier("deltas"), CheckpointBarrier("deltas")
    assert one.send_markers(sender, marker, [0], torch.zeros(PARAMETERS))
    assert other.receive(member) is None
    for event in events:
        other.on_member(MemberEvent(event, 1))
    return other.drain(member, 7, [1], lambda delta: None, 0.1)


def test_a_joiner_s_marker_counts_though_it_comes_before_the_event() -> None:
    assert barrier_with(7)
    assert barrier_with(7, "joined")
    assert not barrier_with(6, "joined")


def test_a_dead_member_s_marker_does_not_count_for_its_replacement() -> None:
    assert not barrier_with(7, "died", "joined")


def test_a_final_marker_counts_until_its_sender_is_replaced() -> None:
    assert barrier_with(FINAL_DRAIN, "died")
    assert not barrier_with(FINAL_DRAIN, "died", "joined")
