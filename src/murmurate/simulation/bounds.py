"""Bounds on the time that HSA2C takes (Mohamad et al., section 8.2.1, eq. 56 and 57)."""

from __future__ import annotations


def total_bounds(T: int, Tc: float, M: int, nw: int, STT: float) -> tuple[float, float]:
    """Eq. 57, T Tc + STT/M <= DTT <= M T Tc + STT/nw, where an update takes no longer than an exchange.

    T: iterations of the master. Tc: seconds of one exchange between master and worker. M: updates that the
    master combines in one iteration. nw: worker nodes. STT: seconds that sequential A2C takes for the same
    updates. The communication alone is T Tc <= TTc <= M T Tc (eq. 56): the exchanges of an iteration in
    parallel, or one after another. Raises ValueError for counts below 1 or a negative time.
    """
    if min(T, M, nw) < 1 or not (Tc >= 0 and STT >= 0):
        raise ValueError(f"{T=}, {M=} and {nw=} are at least 1, {Tc=} and {STT=} at least 0")
    return T * Tc + STT / M, M * T * Tc + STT / nw
