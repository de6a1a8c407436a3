"""A small classifier, trained on the data set itself, by whose features images are compared."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from murmurate.datasets.interface import ExampleSet, Split
from murmurate.errors import Refusal, cause_of
from murmurate.nets.precision import native_bfloat16
from murmurate.spec import EnvSpec, derive_generator, derive_seed

FEATURES = 128
_VERSION = 1  # of the net and its training: files of other versions are not used
_CHANNELS = (32, 64, FEATURES, FEATURES)
_BATCH, _RATE = 128, 2e-3
_EVALUATION_BATCH = 500  # images whose features are computed at a time
_SEED = 0  # not the run's: so runs on the same images have the same classifier, and comparable figures


class FeatureNet(nn.Module):
    """Four convolutions of 3 x 3 pixels with batch normalisation, the second and third with stride 2. The
    last one's means over all pixels are the features [B, 128], from which a linear layer classifies."""

    def __init__(self, image_channels: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = image_channels
        for number, outputs in enumerate(_CHANNELS):
            stride = 2 if number in (1, 2) else 1
            layers += [
                nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
            inputs = outputs
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(FEATURES, classes)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, 128] and logits [B, classes] of images [B, C, H, W] uint8."""
        x = images.contiguous(memory_format=torch.channels_last).float() / 127.5 - 1
        use_bfloat16 = native_bfloat16(x.device)  # scores must not depend on what is faster now
        with torch.autocast(x.device.type, torch.bfloat16, enabled=use_bfloat16):
            features = self.body(x).float().mean((2, 3))
        return features, self.head(features)


@dataclass(frozen=True)
class FeatureClassifier:
    """A trained net. accuracy: on the test images or, without any, on those for validation; None without
    either."""

    net: FeatureNet
    accuracy: float | None

    @torch.no_grad()
    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features [n, 128] and log-probabilities [n, classes] of images [n, C, H, W] uint8, in float64."""
        outputs = [self.net(batch) for batch in torch.split(images, _EVALUATION_BATCH)]
        features, logits = (torch.cat(list(parts)).double() for parts in zip(*outputs, strict=True))
        return features, logits.log_softmax(1)


def feature_classifier(
    path: Path, split: Split, spec: EnvSpec, *, epochs: int, data: Mapping[str, Any] | None
) -> FeatureClassifier:
    """The classifier in ``path``; if there is none that fits, it is trained, and saved there.

    epochs: passes through the training images. data: fingerprint of the data set. Raises Refusal where the
    file cannot be written.
    """
    made_of = json.dumps(
        {"version": _VERSION, "epochs": epochs, "data": data, "trained_on": _digest(split.train)},
        sort_keys=True,
    )
    net = FeatureNet(spec.observation_shape[0], spec.actions)
    classifier = _read(path, net, made_of)
    if classifier is None:
        _train(net, split.train, epochs)
        test = split.test if len(split.test) else split.validation
        classifier = FeatureClassifier(net, _accuracy(net, test))
        _write(path, classifier, made_of)
    return classifier


def refuse_other_file(path: Path) -> None:
    """Raise Refusal if there is something else than a classifier in ``path``: it would be overwritten."""
    if not os.path.lexists(path):
        return
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        if "made_of" in (file.metadata() or {}):
            return
    raise Refusal(
        f"{path} (--feature-net) is something else than the file of a classifier of samples, and is not "
        "overwritten. Move it elsewhere."
    )


def _digest(train: ExampleSet[Any]) -> str | None:
    """Identifies which of the images are trained on: others may be the test images of another split. None if
    these are all."""
    indices = getattr(train, "indices", None)
    return None if indices is None else hashlib.sha256(np.asarray(indices, np.int64).tobytes()).hexdigest()


def _train(net: FeatureNet, train: ExampleSet[Any], epochs: int) -> None:
    """Train by Adam; its rate rises for a tenth of the updates, then falls linearly to 0."""
    generator = derive_generator(_SEED, "feature net")
    for parameter in net.parameters():
        if parameter.dim() > 1:
            weights = torch.empty(parameter.shape)
            nn.init.kaiming_normal_(weights, generator=generator)
            parameter.data.copy_(weights)
    nn.init.zeros_(net.head.bias)
    optimizer = torch.optim.Adam(net.parameters(), lr=_RATE)
    size = min(_BATCH, len(train))
    updates = epochs * (len(train) // size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / (0.1 * updates + 1), (updates - t) / (0.9 * updates + 1))
    )
    net.train()
    for epoch in range(epochs):
        order = np.random.default_rng(derive_seed(_SEED, "feature net", epoch)).permutation(len(train))
        for first in range(0, len(order) - size + 1, size):
            batch = train.select(order[first : first + size])
            loss = F.cross_entropy(net(batch.images)[1], batch.labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    net.eval().requires_grad_(False)


@torch.no_grad()
def _accuracy(net: FeatureNet, test: ExampleSet[Any]) -> float | None:
    if not len(test):
        return None
    correct = readable = 0
    for first in range(0, len(test), _EVALUATION_BATCH):
        batch = test.select(np.arange(first, min(first + _EVALUATION_BATCH, len(test))))
        if not len(batch.labels):  # all of them are broken, and left out
            continue
        readable += len(batch.labels)
        correct += int((net(batch.images)[1].argmax(1) == batch.labels).sum())
    return correct / readable if readable else None


def _read(path: Path, net: FeatureNet, made_of: str) -> FeatureClassifier | None:
    """The classifier in ``path``; None if there is no such file, or it is of other images or versions."""
    try:
        with safe_open(path, "pt") as file:
            saved = file.metadata() or {}
            if saved.get("made_of") != made_of:
                return None
            net.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError, RuntimeError):
        return None
    net.eval().requires_grad_(False)
    return FeatureClassifier(net, json.loads(saved["accuracy"]))


def _write(path: Path, classifier: FeatureClassifier, made_of: str) -> None:
    """Write the classifier atomically: another run may read the file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    tensors = {name: x.contiguous() for name, x in classifier.net.state_dict().items()}
    metadata = {"made_of": made_of, "accuracy": json.dumps(classifier.accuracy)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(save(tensors, metadata))  # ``save_file`` lets only the owner read
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        cause = cause_of(error)
        raise Refusal(
            f"{path} cannot be written: {cause}. Make room there, or train with another --feature-net."
        ) from error
