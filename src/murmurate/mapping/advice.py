"""What would make a configuration faster, or its prediction better."""

from __future__ import annotations

from murmurate.mapping.candidates import Candidate
from murmurate.mapping.profile import NETWORK, DeviceProfile


def advice(candidate: Candidate, profile: DeviceProfile, hosts: int = 1) -> list[str]:
    """Sentences for the user about ``candidate`` on so many hosts."""
    sentences = []
    prediction, cores = candidate.prediction, hosts * profile.cores
    # several threads count as busy for a whole batch, though much of it has one
    is_one_thread = candidate.run.placement.threads == 1
    if prediction.bottleneck == "cores" or (is_one_thread and prediction.busy > 0.9 * cores):
        kept = "the only core" if cores == 1 else f"all {cores} cores"
        sentences.append(f"The run keeps {kept} busy: more cores would make it faster.")
    if hosts > 1 and NETWORK not in profile.links:
        sentences.append("The network is a guess: measure it (--link), or write it into the profile.")
    return sentences
