"""Learners of topics of one small corpus."""

from __future__ import annotations

import functools

import numpy as np
import torch

from murmurate.datasets.generated import generate
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec
from murmurate.workloads.topic_model import TopicModel

K, WORDS, DOCUMENTS = 6, 120, 240
MODEL = TopicModel(topics=K, batch=30, alpha=0.3, prior=0.1, iterations=30, validate_every=0)


@functools.lru_cache
def corpus():
    return generate(
        documents=DOCUMENTS,
        vocabulary=WORDS,
        topics=K,
        mean_length=60,
        seed=1,
        topic_mass=8.0,
        alpha_mass=1.0,
    ).corpus


def learner(replicate=Replica, model=MODEL):
    spec = EnvSpec("corpus", (WORDS,), torch.int32, 0, examples=DOCUMENTS)
    return model.build(Context(spec, replicate, 0, examples=corpus()))


def batches(rank=0, size=1, count=12):
    order = np.random.default_rng(rank).permutation(DOCUMENTS)
    for number in range(count):
        part = order[(number * MODEL.batch + np.arange(MODEL.batch)) % DOCUMENTS]
        yield Batch(corpus().select(part), env_steps=MODEL.batch)
