"""Changes of images against plain oracles, one image at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from murmurate.datasets.image_augmentation import DRAWS, Augmentation, mirrored, shifted
from murmurate.datasets.image_draws import image_draws
from murmurate.errors import Refusal
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


def uniform(count, seed=0):
    numbers = np.arange(count)
    return image_draws(seed, numbers * 0, numbers, DRAWS)


def test_multi_scale_crops_are_uniform_in_scale_and_place():
    """Jin 3.4: the shorter side becomes 256 to 480 pixels, and 224 x 224 are cut from there."""
    augment, height, width = Augmentation(crop="multi-scale"), 300, 500
    crops = [augment.crop_of(height, width, (224, 224), 256, row) for row in uniform(4000)]
    sides = np.array([224 * min(height, width) / crop.height for crop in crops])
    assert np.abs(sides - sides.round()).max() < 1e-9
    assert (sides.round().min(), sides.round().max()) == (256, 480)
    counts, _ = np.histogram(sides.round(), bins=25, range=(255.5, 480.5))
    assert ((counts - 160) ** 2 / 160).sum() < 60  # chi squared, 24 degrees: p < 1e-4
    for crop in crops:
        assert crop.height == crop.width
        assert 0 <= crop.top <= height - crop.height
        assert 0 <= crop.left <= width - crop.width
    places = np.array([(c.top / (height - c.height), c.left / (width - c.width)) for c in crops])
    assert places.mean(0) == pytest.approx((0.5, 0.5), abs=0.02)
    assert places.std(0) == pytest.approx((12**-0.5, 12**-0.5), abs=0.02)
    assert abs(np.corrcoef([sides, *places.T]) - np.eye(3)).max() < 0.06


def test_resized_crops_have_the_areas_and_ratios_of_their_definition():
    """A square image, so that hardly a draw is refused: area uniform, logarithm of the ratio uniform."""
    augment = Augmentation(crop="resized", area=(0.1, 0.4))
    crops = [augment.crop_of(1000, 1000, (224, 224), 256, row) for row in uniform(4000)]
    areas = np.array([c.height * c.width / 1e6 for c in crops])
    ratios = np.log([c.width / c.height for c in crops])
    assert (areas.min(), areas.max()) == pytest.approx((0.1, 0.4), abs=0.002)
    assert areas.mean() == pytest.approx(0.25, abs=0.005)
    assert np.abs(ratios).max() < np.log(4 / 3) + 0.01
    assert ratios.mean() == pytest.approx(0, abs=0.01)
    assert ratios.std() == pytest.approx(2 * np.log(4 / 3) / 12**0.5, abs=0.01)
    for crop in crops:
        assert 0 <= crop.top <= 1000 - crop.height
        assert 0 <= crop.left <= 1000 - crop.width


@pytest.mark.parametrize(("height", "width"), [(100, 1000), (1000, 100), (1, 1), (3, 2000)])
def test_resized_crops_of_narrow_images_are_inside(height, width):
    augment = Augmentation(crop="resized", area=(0.9, 1.0))
    for row in uniform(50):
        top, left, tall, wide = augment.crop_of(height, width, (8, 8), 8, row)
        assert 0 <= top <= height - tall
        assert 0 <= left <= width - wide
        assert tall >= 1
        assert wide >= 1
    assert (tall, wide) == (min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3)))


def test_a_draw_switched_on_does_not_alter_the_others():
    pixels, draws = drawn(60, 8, 8, 3), uniform(60)
    plain = Augmentation(flip=True).apply(pixels, draws)
    bright = Augmentation(flip=True, brightness=0.3).apply(pixels, draws)
    assert not np.array_equal(plain, bright)
    factors = 0.7 + 0.6 * draws[:, 25]
    expected = np.clip(plain.astype(float) * factors[:, None, None, None], 0, 255)
    assert np.abs(bright - expected).max() <= 0.51


def colour_jitter(image, augment, draws):
    """Brightness, contrast and saturation one after the other, in float64 without rounding in between."""
    image, weights = image.astype(np.float64), np.array([0.299, 0.587, 0.114])
    order = list(itertools.permutations(range(3)))[int(draws[28] * 6)]
    for change in order:
        strength = (augment.brightness, augment.contrast, augment.saturation)[change]
        least = max(0, 1 - strength)
        factor = least + draws[25 + change] * (1 + strength - least)
        if change == 0:
            image = image * factor
        elif change == 1:
            image = factor * image + (1 - factor) * (image @ weights).mean()
        else:
            image = factor * image + (1 - factor) * (image @ weights)[..., None]
    return image


@pytest.mark.parametrize("strength", [0.2, 0.4, 1.5])
def test_colour_jitter_is_its_three_steps(strength):
    pytest.importorskip("cv2")
    augment = Augmentation(brightness=strength, contrast=strength, saturation=strength)
    pixels, draws = drawn(30, 7, 9, 3), uniform(30)
    found = augment.apply(pixels, draws)
    orders = set()
    for image, row, was in zip(found, draws, pixels, strict=True):
        expected = colour_jitter(was, augment, row).clip(0, 255)
        assert np.abs(image - expected).max() < 0.8  # OpenCV's coefficients for bytes are fixed-point numbers
        orders.add(int(row[28] * 6))
    assert orders == set(range(6))


def test_lighting_noise_lies_along_the_principal_components():
    pytest.importorskip("cv2")
    augment, count = Augmentation(lighting=0.1), 3000
    grey = np.full((count, 2, 2, 3), 128, np.uint8)
    moved = augment.apply(grey, uniform(count)).astype(float)
    assert (moved == moved[:, :1, :1]).all(), "all pixels of an image move alike"
    shifts = moved[:, 0, 0] - 128
    components = np.array(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
    )
    along = shifts @ components
    # rounding to whole numbers adds a variance of 1/12
    expected = np.sqrt((25.5 * np.array([0.2175, 0.0188, 0.0045])) ** 2 + 1 / 12)
    assert along.std(0) == pytest.approx(expected, rel=0.06)
    assert np.abs(along.mean(0)).max() < 0.35


def test_grey_images_may_change_in_brightness_and_contrast():
    pytest.importorskip("cv2")
    augment, draws = Augmentation(brightness=0.4, contrast=0.4), uniform(20)
    pixels = drawn(20, 6, 6, 1)
    found = augment.apply(pixels, draws)
    assert found.shape == pixels.shape
    three = augment.apply(np.repeat(pixels, 3, -1), draws)
    assert np.abs(three[..., :1].astype(int) - found).max() <= 1


def test_images_in_memory_may_be_cut_and_scaled():
    pytest.importorskip("cv2")
    ramp = np.broadcast_to(np.arange(0, 240, 10, dtype=np.uint8)[:, None], (24, 24))
    pixels, draws = np.repeat(ramp[None, :, :, None], 40, 0), uniform(40)
    augment = Augmentation(crop="resized", area=(0.2, 0.5))
    for image, row in zip(augment.apply(pixels, draws), draws, strict=True):
        crop = augment.crop_of(24, 24, (24, 24), 24, row)
        rows = crop.top + (np.arange(24) + 0.5) * crop.height / 24 - 0.5
        expected = 10 * rows.clip(crop.top, crop.top + crop.height - 1)
        assert np.abs(image[:, 0, 0] - expected).max() <= 1
    # a multi-scale crop of all the image is the image
    same = Augmentation(crop="multi-scale", shortest=(24, 24)).apply(pixels, draws)
    np.testing.assert_array_equal(same, pixels)


@pytest.mark.parametrize(
    ("augment", "shape", "words"),
    [
        (Augmentation(area=(0.5, 0.2)), (3, 32, 32), "the first is the least. Swap"),
        (Augmentation(crop="multi-scale"), (3, 299, 299), r"do not fit in. Use --augment.shortest 299 480"),
        (Augmentation(padding=200), (3, 32, 32), "most crops would be empty"),
        (Augmentation(lighting=0.1), (1, 28, 28), r"1 channel\(s\), and .* Leave them 0"),
    ],
)
def test_what_makes_no_sense_is_refused(augment, shape, words):
    with pytest.raises(Refusal, match=words):
        augment.check(shape)


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
