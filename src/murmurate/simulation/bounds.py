"""How long HSA2C can take: Mohamad et al., section 8.2.1, eq. 56-58.

T: iterations of the master. Tc: seconds of one exchange between master and worker. M: updates that the
master joins in one iteration. nw: worker nodes. STT: seconds that sequential A2C takes for the same updates.
"""

from __future__ import annotations


def communication_bounds(T: int, Tc: float, M: int) -> tuple[float, float]:
    """Eq. 56, T Tc <= TTc <= M T Tc: all exchanges of an iteration side by side, or one after the other.

    Raises ValueError for counts below 1 or a negative time; so do the others here.
    """
    _sensible(T=T, M=M)
    _times(Tc=Tc)
    return T * Tc, M * T * Tc


def total_bounds(T: int, Tc: float, M: int, nw: int, STT: float) -> tuple[float, float]:
    """Eq. 57, T Tc + STT/M <= DTT <= M T Tc + STT/nw, where an update takes no longer than an exchange."""
    _sensible(nw=nw)
    _times(STT=STT)
    least, most = communication_bounds(T, Tc, M)
    return least + STT / M, most + STT / nw


def least_when_bound_by_communication(M: int, STT: float) -> float:
    """Eq. 58, STT < STT (1 + 1/M) <= DTT: with STT <= T Tc, distributing makes it slower.

    B local updates an exchange divide T Tc by B, and with it what eq. 57 gives (section 8.2.1).
    """
    _sensible(M=M)
    _times(STT=STT)
    return STT * (1 + 1 / M)


def _sensible(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} counts something and is at least 1, not {value}")


def _times(**seconds: float) -> None:
    for name, value in seconds.items():
        if not value >= 0:
            raise ValueError(f"{name} is a time and at least 0, not {value}")
