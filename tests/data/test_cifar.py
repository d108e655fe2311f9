"""CIFAR-10, from files made here in its format."""

import io
import logging
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expmflow.data import DataError, load_images
from expmflow.data.cifar import FILES, FOLDER, RECORD, ROWS, read_batch, unpack


def records(rows: int) -> np.ndarray:
    """Record i has the label i modulo 10 and the pixels 0, 1, 2, … modulo 256."""
    values = np.empty((rows, RECORD), np.uint8)
    values[:, 0] = np.arange(rows) % 10
    values[:, 1:] = np.arange(RECORD - 1) % 256
    return values


def test_planes_become_channels(tmp_path: Path):
    values = records(3)
    values[1, 1 + 1024 * 2 + 32 * 5 + 7] = 99
    (tmp_path / "b.bin").write_bytes(values.tobytes())
    images, labels = read_batch(tmp_path / "b.bin", rows=3)
    assert images.shape == (3, 3, 32, 32)
    assert images[1, 2, 5, 7] == 99  # blue plane, sixth line, eighth column
    assert torch.equal(images[0].flatten().long(), torch.arange(3072) % 256)
    assert labels.tolist() == [0, 1, 2]


def test_the_split_is_that_of_the_paper(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / FOLDER).mkdir()
    for number, name in enumerate(FILES):
        with open(tmp_path / FOLDER / name, "wb") as file:
            file.write(bytes([number]) * RECORD)
            file.truncate(ROWS * RECORD)  # all other records are zeros
    with caplog.at_level(logging.WARNING, "expmflow"):
        data = load_images("cifar10", folder=tmp_path, generator=torch.Generator())
    assert data.labels is not None
    assert [len(part) for part in (data.train, data.validation, data.test)] == [40_000, 10_000, 10_000]
    assert data.train[::ROWS, 0, 0, 0].tolist() == data.labels[0][::ROWS].tolist() == [0, 1, 2, 3]
    assert int(data.validation[0].max()) == int(data.labels[1][0]) == 4
    assert int(data.test[0].max()) == int(data.labels[2][0]) == 5
    assert (data.event_shape, data.levels, data.classes) == ((3, 32, 32), 256, 10)
    assert data.train.dtype == torch.uint8
    assert len(caplog.messages) == 6  # these are not the published files


def test_missing_and_wrongly_sized_files_are_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"Expected the file .*data_batch_1\.bin, of the binary version of CIFAR-10"):
        load_images("cifar10", folder=tmp_path, generator=torch.Generator())
    path = tmp_path / "b.bin"
    for content in (b"", bytes(RECORD - 1), bytes(RECORD + 1), bytes(2 * RECORD)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"Expected 1 records of 3073 bytes in .*b\.bin; got {len(content)} bytes"):
            read_batch(path, rows=1)


@given(position=st.integers(0, 2 * RECORD - 1), value=st.integers(0, 255), cut=st.integers(0, 1))
def test_damage_is_refused_or_changes_one_value(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int
):
    path = tmp_path_factory.getbasetemp() / "damaged.bin"
    content = bytearray(records(2).tobytes())
    content[position] = value
    path.write_bytes(content[: len(content) - cut])
    try:
        images, labels = read_batch(path, rows=2)
    except DataError as error:
        message = str(error)
    else:
        assert images.shape == (2, 3, 32, 32)
        assert int(labels.max()) < 10
        return
    assert str(path) in message
    assert cut or (position % RECORD == 0 and value > 9)


def test_only_the_six_files_are_unpacked(tmp_path: Path):
    archive = tmp_path / "a.tar.gz"
    names = ["../outside", *(f"{FOLDER}/{name}" for name in [*FILES, "readme.html"])]
    with tarfile.open(archive, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 5
            tar.addfile(member, io.BytesIO(name[-5:].encode()))
    unpack(archive, tmp_path / "to" / FOLDER)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(["a.tar.gz", *FILES])
