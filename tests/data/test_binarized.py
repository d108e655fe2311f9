"""MNIST in black and white."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expmflow.data import DataError, Dataset, binarized
from expmflow.data.binarized import PUBLISHED, binarize, load_binarized, read_amat


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A few images in the place of MNIST."""
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randint(256, (n, 1, 28, 28), generator=generator, dtype=torch.uint8) for n in (6, 3, 4)]
    labels = tuple(torch.zeros(len(part), dtype=torch.int64) for part in parts)
    grey = Dataset(*parts, labels=labels, classes=10, levels=256)
    monkeypatch.setattr(binarized, "load_mnist", lambda name, folder, progress: grey)
    monkeypatch.setattr(binarized, "PUBLISHED", {"train": 6, "valid": 3, "test": 4})
    return grey


def test_static_images_are_always_the_same(small, monkeypatch):
    monkeypatch.delenv("EXPMFLOW_DATA", raising=False)
    torch.manual_seed(1)
    first = load_binarized()
    torch.manual_seed(2)
    again = load_binarized()
    assert first.levels == 2
    assert first.draw is None
    assert first.digest() == again.digest()
    for part, grey in ((first.train, small.train), (first.test, small.test)):
        assert part.shape == grey.shape
        assert set(part.unique().tolist()) == {0, 1}


def test_dynamic_images_are_drawn_anew_from_the_training_images(small):
    data, static = load_binarized(dynamic=True), load_binarized()
    assert torch.equal(data.test, static.test)
    assert torch.equal(data.validation, static.validation)
    first, again = (data.draw(50, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == (50, 1, 28, 28)
    assert not torch.equal(first, data.draw(50, torch.Generator().manual_seed(4)))


def test_pixels_are_white_as_often_as_they_are_bright():
    grey = torch.tensor([0, 64, 200, 255], dtype=torch.uint8).expand(20_000, 4)
    share = binarize(grey, torch.Generator().manual_seed(0)).double().mean(0)
    torch.testing.assert_close(share, grey[0] / 255.0, rtol=0, atol=0.015, check_dtype=False)
    assert share[0] == 0
    assert share[3] == 1


def amat(path: Path, rows: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(" ".join(map(str, row.tolist())) for row in rows.flatten(1)) + " \n")


def test_published_files_are_read_if_given(small, tmp_path):
    static = replace(load_binarized(), labels=None, classes=0)
    folder = tmp_path / "binarized-mnist"
    for part, rows in (("train", 1 - static.train), ("valid", static.validation), ("test", static.test)):
        amat(folder / f"binarized_mnist_{part}.amat", rows)
    data = load_binarized(tmp_path)
    assert torch.equal(data.train, 1 - static.train)
    assert torch.equal(data.test, static.test)
    assert data.labels is None
    dynamic = load_binarized(tmp_path, dynamic=True)
    assert torch.equal(dynamic.train, static.train)  # of MNIST, as what is drawn from it
    (folder / "binarized_mnist_valid.amat").unlink()
    with pytest.raises(DataError, match=r"^Expected all three files .*; got no .*binarized_mnist_valid\.amat\.$"):
        load_binarized(tmp_path)


@pytest.mark.parametrize(
    ("text", "got"), [("0 1 " * 392, "784 digits"), ("0 2 " * 392 * 2, "other characters"), ("", "0 digits")]
)
def test_files_of_another_form_are_refused(tmp_path, text, got):
    path = tmp_path / "a.amat"
    path.write_text(text)
    with pytest.raises(DataError, match=f"^Expected 2 lines of 784 zeros and ones in .*; got {got}"):
        read_amat(path, 2)
    assert sum(PUBLISHED.values()) == 70_000
