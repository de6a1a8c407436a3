"""The objectives of trust-region policy optimisation and of its clipped successor, PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.losses.checks import check_rank, check_shape


def surrogate(log_prob_t: Tensor, old_log_prob_t: Tensor, advantage_t: Tensor) -> Tensor:
    """The loss ``-mean(rho_t * A_t)`` with the ratio ``rho_t = pi(a_t|s_t) / pi_old(a_t|s_t)``.

    Source: Schulman et al. 2015 (TRPO), eq. 14 with sampled actions and advantages for Q; Schulman et al.
    2017 (PPO), eq. 6. Negative, because it is minimised here.

    Args:
        log_prob_t: log pi(a_t | s_t) [T, B].
        old_log_prob_t: log pi_old(a_t | s_t) [T, B] of the policy that acted; a constant here.
        advantage_t: A_t [T, B]; a constant here.
    """
    return -(_ratio(log_prob_t, old_log_prob_t, advantage_t) * advantage_t.detach()).mean()


def clipped_surrogate(
    log_prob_t: Tensor, old_log_prob_t: Tensor, advantage_t: Tensor, *, clip: float
) -> Tensor:
    """PPO's loss ``-mean(min(rho_t * A_t, clip(rho_t, 1 - epsilon, 1 + epsilon) * A_t))``.

    Source: Schulman et al. 2017, eq. 7. There is no gradient where the ratio has already moved by more than
    epsilon in the direction that the advantage asks for.

    Args:
        log_prob_t: log pi(a_t | s_t) [T, B].
        old_log_prob_t: log pi_old(a_t | s_t) [T, B] of the policy that acted; a constant here.
        advantage_t: A_t [T, B]; a constant here.
        clip: epsilon, at least 0.

    Raises:
        ValueError: on a wrong rank or shape, or a negative ``clip``.
    """
    ratio = _ratio(log_prob_t, old_log_prob_t, advantage_t)
    _check_clip(clip)
    advantage_t = advantage_t.detach()
    return -torch.minimum(ratio * advantage_t, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage_t).mean()


def clipped_value_loss(v_t: Tensor, old_v_t: Tensor, target_t: Tensor, *, clip: float) -> Tensor:
    """``mean(max((V_t - G_t)^2, (V_old + clip(V_t - V_old, -epsilon, epsilon) - G_t)^2))``.

    Source: not a paper but OpenAI's implementation of PPO (``ppo2`` of baselines), which CleanRL follows.
    Differs: without their factor of one half, as in ``value_loss``. The clip is in units of value, so rewards
    should be scaled.

    Args:
        v_t: V_t [T, B].
        old_v_t: V_t before the first update from this rollout [T, B]; a constant here.
        target_t: G_t [T, B]; a constant here.
        clip: epsilon, at least 0.

    Raises:
        ValueError: on a wrong rank or shape, or a negative ``clip``.
    """
    check_rank(2, v_t=v_t)
    check_shape(v_t.shape, "v_t", old_v_t=old_v_t, target_t=target_t)
    _check_clip(clip)
    old_v_t, target_t = old_v_t.detach(), target_t.detach()
    near = old_v_t + (v_t - old_v_t).clamp(-clip, clip)
    return torch.maximum((v_t - target_t).square(), (near - target_t).square()).mean()


def _ratio(log_prob_t: Tensor, old_log_prob_t: Tensor, advantage_t: Tensor) -> Tensor:
    check_rank(2, log_prob_t=log_prob_t)
    check_shape(log_prob_t.shape, "log_prob_t", old_log_prob_t=old_log_prob_t, advantage_t=advantage_t)
    return (log_prob_t - old_log_prob_t.detach()).exp()


def _check_clip(clip: float) -> None:
    if not clip >= 0.0:
        raise ValueError(f"clip must be at least 0, but it is {clip}")
