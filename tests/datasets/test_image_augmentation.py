"""Changes of images against plain oracles, one image at a time."""

from __future__ import annotations

import numpy as np
import pytest

from murmurate.datasets.image_augmentation import DRAWS, Augmentation, mirrored, shifted
from murmurate.datasets.image_draws import image_draws
from pictures import drawn


@pytest.mark.parametrize("channels", [1, 3])
def test_crops_of_the_padded_image(channels):
    pixels = drawn(25, 6, 4, channels)
    top, left = np.divmod(np.arange(25), 5)
    found = shifted(pixels, 2, top, left)
    for k, image in enumerate(pixels):
        wide = np.pad(image, ((2, 2), (2, 2), (0, 0)))
        np.testing.assert_array_equal(found[k], wide[top[k] : top[k] + 6, left[k] : left[k] + 4])
    np.testing.assert_array_equal(found[12], pixels[12])  # the middle


@pytest.mark.parametrize("channels", [1, 3])
def test_mirrors(channels):
    pixels = drawn(4, 3, 5, channels)
    found = mirrored(pixels, np.array([True, False, False, True]))
    for k, is_mirrored in enumerate([True, False, False, True]):
        np.testing.assert_array_equal(found[k], pixels[k][:, ::-1] if is_mirrored else pixels[k])


def test_every_offset_and_both_directions_are_drawn():
    pixels = np.zeros((2000, 5, 5, 1), np.uint8)
    pixels[:, 2, 1] = 255
    numbers = np.arange(2000)
    found = Augmentation(padding=1, flip=True).apply(pixels, image_draws(0, numbers * 0, numbers, DRAWS))
    places = [tuple(np.argwhere(image[..., 0])[0]) for image in found]
    # rows 1..3; columns 0..2, and mirrored 2..4
    share = {place: places.count(place) / 2000 for place in set(places)}
    assert set(share) == {(row, column) for row in (1, 2, 3) for column in range(5)}
    for (_, column), found_share in share.items():
        assert found_share == pytest.approx((2 if column == 2 else 1) / 18, abs=0.03)
