"""MNIST and Fashion-MNIST, from files made here in their format."""

import gzip
import logging
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expmflow.data import DataError, Dataset, load_images
from expmflow.data.idx import SHAPES, read_idx


def idx_bytes(values: np.ndarray) -> bytes:
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def small() -> np.ndarray:
    return np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)


def write_set(folder: Path) -> None:
    """All four files in their full size: image i is i modulo 251 everywhere, and has the label i modulo 10."""
    folder.mkdir(parents=True)
    for name, shape in SHAPES.items():
        number = np.arange(shape[0])
        values = np.zeros(shape, np.uint8)
        values[:] = (number % 10) if len(shape) == 1 else (number % 251)[:, None, None]
        (folder / name).write_bytes(idx_bytes(values))


def load(name: str, folder: Path | None = None) -> Dataset:
    return load_images(name, folder=folder, generator=torch.Generator())


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_split_follows_the_order_of_the_files(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write_set(tmp_path / name)
    monkeypatch.setenv("EXPMFLOW_DATA", str(tmp_path))
    with caplog.at_level(logging.WARNING, "expmflow"):
        data = load(name)
    assert data.labels is not None
    parts = [(data.train, 0, 50_000), (data.validation, 50_000, 60_000), (data.test, 0, 10_000)]
    for (images, start, end), labels in zip(parts, data.labels, strict=True):
        assert images.shape == (end - start, 1, 28, 28)
        assert images.dtype == torch.uint8
        assert torch.equal(images[:, 0, 3, 9].long(), torch.arange(start, end) % 251)
        assert torch.equal(labels, torch.arange(start, end) % 10)
    assert (data.classes, data.levels, data.event_shape) == (10, 256, (1, 28, 28))
    assert len(caplog.messages) == 4  # these are not the published files
    assert all("differs from the published file" in message for message in caplog.messages)


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EXPMFLOW_DATA", "/nowhere")
    with pytest.raises(DataError, match=r"Expected the file .*train-images-idx3-ubyte\.gz, or the same without \.gz"):
        load("mnist", tmp_path)


def test_labels_beyond_the_classes_are_refused(tmp_path: Path):
    write_set(tmp_path / "mnist")
    labels = np.zeros(60_000, np.uint8)
    labels[7] = 10
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    with pytest.raises(DataError, match=r"Expected labels from 0 to 9 in .*train-labels-idx1-ubyte; got 10\."):
        load("mnist", tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_packed_or_not_the_values_are_the_same(tmp_path: Path, suffix: str):
    content = idx_bytes(small())
    path = tmp_path / f"x-ubyte{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert np.array_equal(read_idx(path, (3, 4, 5)).numpy(), small())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "another header"),
        (idx_bytes(small())[:-1], "got fewer"),
        (idx_bytes(small()) + b"\0", "got more"),
        (idx_bytes(small()[:2]), "another header"),
        (idx_bytes(small().reshape(3, 20)), "another header"),
        (b"\x1f\x8b" + idx_bytes(small()), "another header"),
    ],
)
def test_other_sizes_and_headers_are_refused(tmp_path: Path, content: bytes, message: str):
    for path in (tmp_path / "x-ubyte", tmp_path / "x-ubyte.gz"):
        path.write_bytes(gzip.compress(content) if path.suffix else content)
        with pytest.raises(DataError, match=r"Expected .*3×4×5 bytes") as caught:
            read_idx(path, (3, 4, 5))
        assert message in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_truncated_archive_is_refused(tmp_path: Path):
    path = tmp_path / "x.gz"
    packed = gzip.compress(idx_bytes(small()))
    for length in (1, 12, len(packed) - 9, len(packed) - 1):
        path.write_bytes(packed[:length])
        with pytest.raises(DataError, match="Expected a whole file in"):
            read_idx(path, (3, 4, 5))


@given(position=st.integers(0, 200), value=st.integers(1, 255), kept=st.integers(0, 200), packed=st.booleans())
def test_damage_is_refused_or_leaves_the_shape(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, kept: int, packed: bool
):
    path = tmp_path_factory.getbasetemp() / ("damaged.gz" if packed else "damaged")
    content = bytearray(gzip.compress(idx_bytes(small())) if packed else idx_bytes(small()))
    content[position % len(content)] ^= value
    path.write_bytes(content[: kept or None])
    try:
        values = read_idx(path, (3, 4, 5))
    except DataError as error:
        message = str(error)
    else:
        assert values.shape == (3, 4, 5)
        return
    assert str(path) in message
    assert "\n" not in message
