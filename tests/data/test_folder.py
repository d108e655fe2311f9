"""Image files and folders of them."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from expmflow.data import DataError
from expmflow.data.folder import find_pictures, folder_labels, read_pictures
from expmflow.data.form import Form
from expmflow.data.own import read_own
from expmflow.data.pictures import ORIENTATION, SUFFIXES

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)
GREY = RNG.integers(0, 256, (6, 8), dtype=np.uint8)


def read(path: Path, form: Form | None = None) -> np.ndarray:
    return read_pictures([path], form or Form())[0]


def saved(folder: Path, array: np.ndarray, name: str = "x.png") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


def encoded(suffix: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(COLOUR).save(buffer, Image.registered_extensions()[suffix])
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".TIFF"])
@pytest.mark.parametrize("array", [GREY, COLOUR])
def test_lossless_formats_keep_every_byte(tmp_path: Path, array: np.ndarray, suffix: str):
    assert np.array_equal(read(saved(tmp_path, array, f"x{suffix}")), array)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_suffix_is_read(tmp_path: Path, suffix: str):
    (tmp_path / f"x{suffix}").write_bytes(encoded(suffix))
    assert read(tmp_path / f"x{suffix}").shape == (6, 8, 3)


def test_of_several_frames_the_first_is_taken(tmp_path: Path):
    frames = [Image.fromarray(np.full((6, 8), value, np.uint8)) for value in (40, 80)]
    for name in ("x.gif", "x.tif", "x.png"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        assert np.unique(read(tmp_path / name)).tolist() == [40]
    frames[0].save(tmp_path / "x.jpg", "MPO", save_all=True, append_images=frames[1:])  # as phones write them
    assert np.abs(read(tmp_path / "x.jpg").astype(int) - 40).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_the_camera_was(tmp_path: Path, orientation: int):
    image = Image.fromarray(COLOUR)
    exif = image.getexif()
    exif[ORIENTATION] = orientation
    image.save(tmp_path / "x.png", exif=exif)
    with Image.open(tmp_path / "x.png") as found:
        assert np.array_equal(read(tmp_path / "x.png"), np.asarray(ImageOps.exif_transpose(found)))
    assert read(tmp_path / "x.png").shape == ((6, 8, 3) if orientation < 5 else (8, 6, 3))


@pytest.mark.parametrize("array", [GREY, COLOUR])
def test_transparency_shows_white(tmp_path: Path, array: np.ndarray):
    alpha = RNG.integers(0, 256, (6, 8), dtype=np.uint8)
    alpha[0], alpha[1] = 0, 255
    values = read(saved(tmp_path, np.dstack([array, alpha])))
    share = (alpha / 255).reshape(6, 8, *[1] * (array.ndim - 2))
    assert values.shape == array.shape
    assert np.abs(values - (array * share + 255 * (1 - share))).max() <= 1
    assert (values[0] == 255).all()
    assert np.array_equal(values[1], array[1])


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "1"])
def test_one_transparent_colour_shows_white(tmp_path: Path, mode: str):
    image = Image.new(mode, (3, 2), 1 if mode != "RGB" else (1, 1, 1))
    if mode == "P":
        image.putpalette([0, 0, 0, 9, 8, 7])
    image.putpixel((0, 0), 0 if mode != "RGB" else (0, 0, 0))
    image.save(tmp_path / "x.png", transparency=0 if mode != "RGB" else (0, 0, 0))
    values = read(tmp_path / "x.png")
    assert (values[0, 0] == 255).all()
    assert values[1, 1].tolist() == {"P": [9, 8, 7], "L": 1, "RGB": [1, 1, 1], "1": 255}[mode]


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path, suffix: str):
    wide = RNG.integers(0, 65536, (6, 8), dtype=np.uint16)
    wide[0, :2] = 0, 65535
    values = read(saved(tmp_path, wide, f"x{suffix}"))
    assert np.abs(values - wide * (255 / 65535)).max() <= 0.5
    assert values[0, :2].tolist() == [0, 255]


@pytest.mark.parametrize(("kind", "words"), [(np.float32, "floats"), (np.int32, "32-bit integers")])
def test_wider_numbers_are_refused(tmp_path: Path, kind: type, words: str):
    path = saved(tmp_path, GREY.astype(kind), "x.tif")
    with pytest.raises(DataError, match=rf"Expected an image of 8 or 16 bits in .*x\.tif; got {words}\."):
        read(path)


def test_other_colour_spaces_become_rgb(tmp_path: Path):
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "x.tif")
    assert read(tmp_path / "x.tif")[0, 0].tolist() == [255, 0, 0]


def test_channels_are_converted_on_demand(tmp_path: Path):
    grey, colour = saved(tmp_path, GREY, "g.png"), saved(tmp_path, COLOUR, "c.png")
    assert np.array_equal(read(grey, Form(channels="rgb")), GREY[..., None].repeat(3, 2))
    luma = COLOUR @ [0.299, 0.587, 0.114]
    assert np.abs(read(colour, Form(channels="grey")) - luma).max() <= 1


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (8, 8), (3, 5), (1, 40)])
def test_a_crop_keeps_the_middle_and_its_proportions(tmp_path: Path, shape: tuple[int, int]):
    """A ramp stays the ramp of the middle square, along both axes."""
    short = min(shape)
    across, down = (np.arange(n) - (n - 1) / 2 for n in shape[::-1])
    image = np.round(128 + 2 * across[None, :] + down[:, None]).astype(np.uint8)
    values = read(saved(tmp_path, image), Form((4, 4)))
    steps = (np.arange(4) - 1.5) * short / 4
    inside = slice(1, 3)  # cubics flatten at the border
    expected = 128 + 2 * steps[None, :] + steps[:, None]
    assert values.shape == (4, 4)
    assert np.abs(values - expected)[inside, inside].max() < 2


def test_without_a_crop_everything_is_squashed(tmp_path: Path):
    image = np.zeros((10, 40), np.uint8)
    image[:, 20:] = 200
    path = saved(tmp_path, image)
    assert read(path, Form((4, 6), crop=False)).shape == (4, 6)
    assert read(path, Form((2, 8), crop=False))[:, [0, -1]].tolist() == [[0, 200]] * 2


def test_a_flat_image_stays_flat_at_any_size(tmp_path: Path):
    for size in [(1, 1), (3, 9), (64, 64)]:
        for crop in (True, False):
            assert (read(saved(tmp_path, np.full((7, 11), 93, np.uint8)), Form(size, crop)) == 93).all()


def test_a_large_jpeg_is_scaled_as_a_png(tmp_path: Path):
    smooth = np.add.outer(np.arange(400), np.arange(600)) // 4
    image = Image.fromarray(smooth.astype(np.uint8))
    image.save(tmp_path / "x.png")
    image.save(tmp_path / "x.jpg", quality=95)
    ways = [read(tmp_path / name, Form((16, 16))).astype(int) for name in ("x.png", "x.jpg")]
    assert np.abs(ways[0] - ways[1]).max() <= 2


def test_levels_hold_before_and_after_scaling(tmp_path: Path):
    path = saved(tmp_path, (GREY > 128).astype(np.uint8) * 3)
    assert read(path, Form((16, 16), levels=4)).max() <= 3
    with pytest.raises(DataError, match=r"Expected grey levels from 0 to 2 in .*x\.png; got 3"):
        read(path, Form(levels=3))


def test_too_many_pixels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = saved(tmp_path, GREY)
    for most in (40, 10):  # Pillow warns of the first, and raises at the second
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(DataError, match=rf"Expected an image of at most {most} pixels in .*x\.png; got a larger"):
            read(path)


def test_what_is_no_image_is_named(tmp_path: Path):
    path = tmp_path / "x.png"
    for content in (b"", b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"Expected an image in .*x\.png; got no format that is known"):
            read(path)
    path.write_bytes(encoded(".png")[:-60])
    with pytest.raises(DataError, match=r"Expected a whole image in .*x\.png; got: "):
        read(path)


@given(
    suffix=st.sampled_from(SUFFIXES),
    flips=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 255)), max_size=4),
    cut=st.one_of(st.just(0), st.integers(0, 1000)),
    form=st.sampled_from([Form(), Form((4, 4)), Form((4, 4), crop=False, channels="grey")]),
)
def test_damage_is_refused_or_leaves_an_image(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, flips: list[tuple[int, int]], cut: int, form: Form
):
    content = bytearray(encoded(suffix))
    for position, value in flips:
        content[position % len(content)] ^= value
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    path.write_bytes(content[: len(content) - cut % len(content)])
    try:
        array = read(path, form)
    except DataError as error:
        message = str(error)
    else:
        assert array.dtype == np.uint8
        assert array.ndim in (2, 3)
        return
    assert str(path) in message
    assert "\n" not in message


def test_a_folder_is_searched_in_order(tmp_path: Path):
    for name in ("b/2.png", "b/10.JPG", "a.png", "c/d/e.bmp", ".hidden.png", ".git/x.png", "b/._2.png"):
        saved(tmp_path, GREY, name)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "c" / "back").symlink_to(tmp_path)
    found = [path.relative_to(tmp_path).as_posix() for path in find_pictures(tmp_path)]
    assert found == ["a.png", "b/10.JPG", "b/2.png", "c/d/e.bmp"]


def test_a_folder_without_images_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match=r"Expected images \(png, jpg, .*\) in .*; got none\."):
        find_pictures(tmp_path)


def test_sub_folders_are_classes(tmp_path: Path):
    paths = [tmp_path / name for name in ("cat/1.png", "cat/old/2.png", "dog/1.png", "emu/1.png")]
    labels = folder_labels(tmp_path, paths)
    assert labels is not None
    assert labels.dtype == torch.int64
    assert labels.tolist() == [0, 0, 1, 2]
    assert folder_labels(tmp_path, [*paths, tmp_path / "x.png"]) is None
    assert folder_labels(tmp_path, paths[:2]) is None


def test_pictures_keep_their_order_and_are_counted(tmp_path: Path):
    paths = [saved(tmp_path, np.full((4, 4), k, np.uint8), f"{k}.png") for k in range(40)]
    told: list[tuple[str, int, int]] = []
    arrays = read_pictures(paths, Form(), lambda *news: told.append(news))
    assert [int(array[0, 0]) for array in arrays] == list(range(40))
    assert told == [("images", k, 40) for k in range(1, 41)]


def test_all_broken_files_are_listed_at_once_or_left_out(tmp_path, caplog):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for k in range(3):
            Image.fromarray(np.full((4, 4), k, dtype=np.uint8)).save(tmp_path / name / f"{k}.png")
    for broken in ("a/8.png", "b/9.png"):
        (tmp_path / broken).write_bytes(b"no image")
    with pytest.raises(DataError) as caught:
        read_own(tmp_path, Form())
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("got 2 files that are broken:")
    assert "data.skip_broken=true" in first
    assert [str(tmp_path / name) in line for name, line in zip(("a/8.png", "b/9.png"), lines, strict=True)] == [
        True
    ] * 2
    found = read_own(tmp_path, Form(), skip_broken=True)
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.class_names == ("a", "b")
    assert found.rows.flatten(1)[:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert "Of 8 files, left out 2 files that are broken:" in caplog.text
    assert all(str(tmp_path / name) in caplog.text for name in ("a/8.png", "b/9.png"))
    (tmp_path / "b" / "9.png").unlink()
    with pytest.raises(DataError, match=r"^Expected 7 images, or data\.skip_broken=true .*; got 1 file that is"):
        read_own(tmp_path, Form())
    for path in tmp_path.glob("*/?.png"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="Expected an image in"):
        read_own(tmp_path, Form(), skip_broken=True)


def test_images_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in ("notes.txt", "IMG_2.HEIC", "a/IMG_1.heic", "raw.dng", ".hidden.heic"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"no image that is known")
    with pytest.raises(DataError, match=r"got 3 of formats that are not read \(dng, heic\), such as IMG_2\.HEIC\.$"):
        find_pictures(tmp_path)
    picture = saved(tmp_path, GREY)
    assert find_pictures(tmp_path) == [picture]
    assert [record.getMessage() for record in caplog.records] == [
        f"Of the images in {tmp_path}, left out 3 of formats that are not read (dng, heic), such as IMG_2.HEIC. "
        "Read are png, jpg, jpeg, bmp, gif, webp, tif, tiff."
    ]
    (tmp_path / "IMG_2.HEIC").unlink(), (tmp_path / "a/IMG_1.heic").unlink(), (tmp_path / "raw.dng").unlink()
    caplog.clear()
    assert find_pictures(tmp_path) == [picture]
    assert not caplog.records
