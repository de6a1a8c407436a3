"""What to suggest in place of an unknown field: the names of other packages come before similar spellings."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection

_RATES = (("learning-rate",), ("policy-rate", "critic-rate"), ("value-learning-rate",))
_STEPS = (("steps",), ("n-step",))
_RATIOS = (("samples-per-insert",), ("updates-per-step",))
# names of Stable-Baselines3, CleanRL and others -> ours; of several alternatives the first that exists
_ALIASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "actor-lr": (("policy-rate",), *_RATES),
    "alpha": (("temperature",),),
    "anneal-lr": (("learning-rate-end",),),
    "batch-size": (("batch",), ("minibatches",)),
    "buffer-size": (("capacity",),),
    "clip-coef": (("ratio-clip",),),
    "clip-grad": (("clip",),),
    "clip-range": (("ratio-clip",),),
    "clip-range-vf": (("value-clip",),),
    "clip-vloss": (("value-clip",),),
    "critic-lr": (("critic-rate",), *_RATES),
    "device": (("devices",),),
    "end-e": (("epsilon",),),
    "ent-coef": (("entropy-coefficient",), ("temperature",)),
    "entropy-coef": (("entropy-coefficient",), ("temperature",)),
    "eval-freq": (("evaluate-every-env-steps",),),
    "exploration-final-eps": (("epsilon",),),
    "exploration-fraction": (("explore-updates",),),
    "gamma": (("discount",),),
    "grad-clip": (("clip",),),
    "gradient-steps": _RATIOS,
    "hidden-dim": (("hidden",),),
    "hidden-size": (("hidden",),),
    "learning-rate": _RATES,
    "lr": _RATES,
    "max-grad-norm": (("clip",),),
    "minibatch-size": (("minibatches",), ("batch",)),
    "n-envs": (("simulators",),),
    "n-epochs": (("epochs",),),
    "n-eval-episodes": (("eval-episodes",),),
    "n-steps": _STEPS,
    "net-arch": (("hidden",),),
    "network": (("torso",),),
    "norm-adv": (("normalize-advantages",),),
    "normalize-advantage": (("normalize-advantages",),),
    "num-env-runners": (("actors",), ("simulators",)),
    "num-envs": (("simulators",),),
    "num-envs-per-env-runner": (("simulators",),),
    "num-minibatches": (("minibatches",),),
    "num-steps": _STEPS,
    "policy-frequency": (("policy-delay",),),
    "policy-lr": (("policy-rate",), *_RATES),
    "policy-noise": (("target-noise",),),
    "q-lr": (("critic-rate",), *_RATES),
    "target-kl": (("max-kl",),),
    "target-network-frequency": (("target-every",),),
    "target-policy-noise": (("target-noise",),),
    "target-update-interval": (("target-every",),),
    "tau": (("polyak",), ("target-rate",)),
    "timesteps": (("env-steps",),),
    "total-timesteps": (("env-steps",),),
    "train-batch-size": (("batch",), ("steps",)),
    "train-freq": _RATIOS,
    "train-frequency": _RATIOS,
    "update-epochs": (("epochs",),),
    "vf-coef": (("value-coefficient",),),
    "workers": (("replicas",),),
}
# what another package's number has to be turned into for ours, said wherever one of the names above led to it
_CONVERSIONS = {
    "evaluate-every-env-steps": "It counts env steps of all simulators and learners.",
    "explore-updates": "It counts a learner's updates: env steps x replay.samples_per_insert / agent.batch.",
    "learning-rate-end": "It is a share of the first rate: 0 anneals linearly to 0, 1 keeps it constant.",
    "minibatches": "It is the number of parts of a rollout: agent.steps x simulators / the size of a part.",
    "samples-per-insert": "It is the number of updates per env step, times agent.batch.",
    "steps": "It counts steps of each simulator.",
    "target-every": "It counts a learner's updates, not env steps.",
    "temperature": "It is the initial value, which stays only if temperature_rate is 0.",
    "value-clip": "It is the largest change of a value; inf: no limit.",
    "value-coefficient": "It multiplies the mean squared error: SB3's vf_coef, half of CleanRL's.",
}
# names of other packages that nothing here stands for
_ABSENT = {
    "target-kl": "No agent ends its epochs at a KL divergence: use fewer epochs, or trpo, which has max_kl.",
    "use-sde": "There is no state-dependent exploration.",
}
# names under which other packages pass arguments on to an environment
_ENVIRONMENT_ARGUMENTS = ("kwargs", "env-kwargs", "env-args", "make-kwargs")
_OWN_FUNCTION = (
    " An environment that takes arguments is made by a function of your own, which calls it with them: --env "
    "FILE.py:NAME, or env=FUNCTION in Python."
)
_LEAST_SIMILARITY = 0.7


def hint(name: str, known: Collection[str], write: Callable[[str], str]) -> str:
    """A sentence about which of ``known`` is meant by the unknown ``name``, after a space; empty if none is.

    known: names, with the groups that they are in before a dot. write: how a known name is written.
    """
    wanted = _last(name)
    if elsewhere := [each for each in known if _last(each) == wanted]:
        return f" Did you mean {' or '.join(map(write, elsewhere))}?"
    by_last: dict[str, str] = {}
    for each in sorted(known, key=lambda each: not each.startswith("agent.")):
        by_last.setdefault(_last(each), each)
    for names in _ALIASES.get(wanted, ()):
        if by_last.keys() >= set(names):
            meant = f" Did you mean {' and '.join(write(by_last[each]) for each in names)}?"
            conversion = _CONVERSIONS.get(names[0])
            return f"{meant} {conversion}" if conversion else meant
    if wanted in _ABSENT:
        return f" {_ABSENT[wanted]}"
    if wanted in ("torso", "network") and "hidden" in by_last:
        return f" This agent's nets are MLPs, whose layers have {write(by_last['hidden'])} units."
    is_gymnasium = any(_last(each) == "joint-actions" for each in known)
    if wanted in _ENVIRONMENT_ARGUMENTS:
        return _OWN_FUNCTION if is_gymnasium else ""
    # without the groups, whose names would make any two fields of a group similar
    near = difflib.get_close_matches(wanted, by_last, n=1, cutoff=_LEAST_SIMILARITY)
    if near:
        alike = [each for each in known if _last(each) == near[0]]
        return f" Did you mean {write(difflib.get_close_matches(name, alike, n=1, cutoff=0.0)[0])}?"
    return _OWN_FUNCTION if is_gymnasium and name.startswith("world.") else ""


def _last(name: str) -> str:
    return name.rpartition(".")[2].replace("_", "-").lower()
