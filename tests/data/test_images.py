"""Images by name, and the user's own files."""

import ast
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import expmflow.data
from expmflow.data import DataError, Dataset, load_image_files, load_images
from expmflow.data.kinds import KINDS, Layout

RNG = np.random.default_rng(0)


def own(path: Path, seed: int = 0, **options: Any) -> Dataset:
    return load_images("images", path=path, generator=torch.Generator().manual_seed(seed), **options)


def picture(path: Path, shape: tuple[int, ...], value: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = RNG.integers(0, 256, shape) if value is None else np.full(shape, value)
    Image.fromarray(array.astype(np.uint8)).save(path)
    return path


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """Thirty images in three classes; image k of class c is 10 c + k everywhere."""
    for c in range(3):
        for k in range(10):
            picture(tmp_path / "set" / f"class{c}" / f"{k}.png", (4, 6), 10 * c + k)
    return tmp_path / "set"


def test_digits_are_the_same_in_every_run():
    data = load_images("digits", generator=torch.Generator().manual_seed(3))
    again = load_images("digits", generator=torch.Generator().manual_seed(4))
    assert data.labels is not None
    parts = (data.train, data.validation, data.test)
    assert torch.equal(data.test, again.test)
    assert sum(map(len, parts)) == 1797
    assert (data.event_shape, data.levels, data.classes) == ((1, 8, 8), 17, 10)
    for part, labels in zip(parts, data.labels, strict=True):
        counts = labels.bincount(minlength=10)
        assert len(labels) == len(part)
        assert (int(part.min()), int(part.max()), part.dtype) == (0, 16, torch.uint8)
        assert counts.max() - counts.min() <= 6


def test_digits_look_like_their_labels():
    data = load_images("digits", generator=torch.Generator())
    assert data.labels is not None
    means = torch.stack([data.train[data.labels[0] == k].float().mean(0).flatten() for k in range(10)])
    nearest = torch.cdist(data.test.float().flatten(1), means).argmin(1)
    assert (nearest == data.labels[2]).float().mean() > 0.85


def test_rows_and_labels_are_shuffled_together(numbered: Path):
    data = own(numbered, validation=0.2, test=0.3)
    assert data.labels is not None
    assert [len(part) for part in (data.train, data.validation, data.test)] == [15, 6, 9]
    rows, labels = torch.cat([data.train, data.validation, data.test]), torch.cat(data.labels)
    values = rows[:, 0, 0, 0].long()
    assert values.sort().values.tolist() == list(range(30))
    assert values.tolist() != list(range(30))
    assert torch.equal(labels, values // 10)
    assert (data.classes, data.levels, data.event_shape) == (3, 256, (1, 4, 6))
    assert torch.equal(data.train, own(numbered, validation=0.2, test=0.3).train)
    assert not torch.equal(data.train, own(numbered, 1, validation=0.2, test=0.3).train)


def test_one_coloured_image_makes_all_rgb(numbered: Path):
    picture(numbered / "class0" / "x.png", (4, 6, 3))
    assert own(numbered).event_shape == (3, 4, 6)
    assert own(numbered, channels="grey").event_shape == (1, 4, 6)


def test_images_of_two_sizes_need_one(numbered: Path):
    picture(numbered / "class1" / "odd.png", (5, 6))
    with pytest.raises(DataError) as caught:
        own(numbered)
    assert "Expected images of one size, or an option such as data.size=32" in str(caught.value)
    assert "got 6×4 in " in str(caught.value)
    assert "and 6×5 in " in str(caught.value)
    assert "odd.png" in str(caught.value)
    assert own(numbered, size=8).event_shape == (1, 8, 8)
    assert own(numbered, size=8, crop=False, channels="rgb").event_shape == (3, 8, 8)


def test_arrays_take_the_same_options(tmp_path: Path):
    np.savez(tmp_path / "x.npz", images=RNG.integers(0, 16, (20, 9, 7, 3)), labels=np.arange(20) % 4)
    data = own(tmp_path / "x.npz", levels=16)
    assert (data.event_shape, data.levels, data.classes) == ((3, 9, 7), 16, 4)
    small = own(tmp_path / "x.npz", levels=16, size=5, channels="grey")
    assert small.event_shape == (1, 5, 5)
    assert int(small.train.max()) < 16


def test_a_folder_and_its_array_are_the_same_data(numbered: Path, tmp_path: Path):
    files = sorted(numbered.rglob("*.png"))
    np.save(tmp_path / "x.npy", np.stack([np.asarray(Image.open(file)) for file in files]))
    for options in ({}, {"size": 8}, {"size": 3, "crop": False}, {"channels": "rgb"}):
        assert torch.equal(own(numbered, **options).train, own(tmp_path / "x.npy", **options).train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "imagenet"}, "Expected one of digits, mnist, fashion-mnist, cifar10, images; got 'imagenet'"),
        ({"name": "images"}, "Expected data.path, a folder of images, a .npy or a .npz file; got none"),
        ({"name": "mnist", "size": 32}, "Expected data.size with data.name=images only; got 32 with mnist"),
        ({"name": "digits", "path": Path("x")}, "Expected data.path with data.name=images only; got x with digits"),
        ({"name": "images", "path": Path("no-such")}, "got no-such, which does not exist"),
        ({"name": "images", "path": Path(__file__)}, "Expected a folder of images, a .npy or a .npz file; got"),
        ({"name": "images", "path": Path("x.npy"), "size": 0}, "Expected data.size of at least 1; got 0"),
        ({"name": "images", "path": Path("x.npy"), "levels": 257}, "Expected data.levels of at most 256; got 257"),
        ({"name": "images", "path": Path("x.npy"), "channels": "cmyk"}, "Expected data.channels to be rgb or grey"),
        ({"name": "images", "path": Path("x.npy")}, "Expected the file x.npy; got none"),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match="Expected") as caught:
        load_images(**options, generator=torch.Generator())
    assert message in str(caught.value)


def test_files_to_score_keep_their_order_and_names(numbered: Path, tmp_path: Path):
    np.save(tmp_path / "x.npy", np.full((2, 4, 6), 99, np.uint8))
    single = picture(tmp_path / "y.png", (4, 6), 50)
    rows, names = load_image_files([single, tmp_path / "x.npy", numbered / "class2"], (1, 4, 6))
    assert rows[:, 0, 0, 0].tolist() == [50, 99, 99, *range(20, 30)]
    assert names[:4] == [str(single), f"{tmp_path}/x.npy[0]", f"{tmp_path}/x.npy[1]", f"{numbered}/class2/0.png"]
    assert rows.dtype == torch.uint8


def test_files_to_score_become_what_training_saw(numbered: Path):
    trained = own(numbered, size=8, validation=0, test=0)
    rows, _ = load_image_files([numbered], trained.event_shape, size=8)
    assert torch.equal(rows.flatten(1).unique(dim=0), trained.train.flatten(1).unique(dim=0))
    assert load_image_files([numbered], (3, 4, 6))[0].shape == (30, 3, 4, 6)  # grey images for a model of colours


def test_broken_files_are_left_out_of_scores_as_of_training(numbered: Path, caplog: pytest.LogCaptureFixture):
    (numbered / "class2" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"^Expected 30 images; got 1 file that is broken:\n  Expected an image in"):
        KINDS["images"].read([numbered], Layout((1, 4, 6)), fit=False, progress=None)
    layout = Layout((1, 4, 6), settings={"skip_broken": True})
    found = KINDS["images"].read([numbered], layout, fit=False, progress=None)
    assert found.names == [f"{numbered}/class{k}/{j}.png" for k in range(3) for j in range(10) if (k, j) != (2, 0)]
    assert found.rows[:, 0, 0, 0].tolist() == [k for k in range(30) if k != 20]
    assert "Of 30 files, left out 1 file that is broken:" in caplog.text


def test_files_that_do_not_fit_are_named(numbered: Path, tmp_path: Path):
    colour = picture(tmp_path / "c.png", (4, 6, 3))
    np.save(tmp_path / "x.npy", np.zeros((2, 4, 5), np.uint8))
    (tmp_path / "t.txt").write_text("text")
    cases: list[tuple[Path, str]] = [
        (colour, "Expected a grey image in .*c.png, as the model has one channel; got a coloured one"),
        (tmp_path / "x.npy", r"Expected an image of 6×4 pixels in .*x\.npy\[0\]; got 5×4"),
        (tmp_path / "t.txt", r"Expected a folder or a file \(png, .*npz\); got .*t\.txt"),
        (tmp_path / "none.png", r"got .*none\.png, which does not exist"),
    ]
    for path, message in cases:
        with pytest.raises(DataError, match=message):
            load_image_files([numbered, path], (1, 4, 6))
    assert load_image_files([colour], (1, 4, 6), channels="grey")[0].shape == (1, 1, 4, 6)
    with pytest.raises(ValueError, match="Expected at least one file or folder of images; got none"):
        load_image_files([], (1, 4, 6))
    with pytest.raises(ValueError, match="Expected an event shape"):
        load_image_files([colour], (24,))


def test_nothing_heavy_is_imported_before_it_is_needed():
    for file in Path(expmflow.data.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            heavy = {name.split(".")[0] for name in names} & {"PIL", "pooch", "requests", "sklearn"}
            assert not heavy, f"{file.name} imports {heavy}"


@pytest.mark.parametrize(
    ("module", "data", "name"),
    [("sklearn", "digits", "scikit-learn"), ("PIL", "images", "Pillow"), ("pooch", "cifar10", "pooch")],
)
def test_what_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, data: str, name: str
):
    picture(tmp_path / "x.png", (4, 6))
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delenv("EXPMFLOW_DATA", raising=False)
    path = tmp_path if data == "images" else None
    with pytest.raises(ImportError, match=rf"Expected {name} .*; got none\. Install the extra `train`\."):
        load_images(data, path=path, generator=torch.Generator())
