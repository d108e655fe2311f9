"""Images in `.npy` and `.npz` files."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expmflow.data import DataError
from expmflow.data.arrays import read_arrays

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (4, 3, 5, 6), dtype=np.uint8)
GREY = RNG.integers(0, 256, (4, 1, 5, 6), dtype=np.uint8)


def saved(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "x.npy", array)
    return folder / "x.npy"


@pytest.mark.parametrize(
    ("array", "images"),
    [
        (COLOUR, COLOUR),
        (COLOUR.transpose(0, 2, 3, 1), COLOUR),
        (GREY, GREY),
        (GREY[:, 0], GREY),
        (GREY.transpose(0, 2, 3, 1), GREY),
        (np.asfortranarray(COLOUR), COLOUR),
        (COLOUR.astype(">i4"), COLOUR),
        (COLOUR.astype(np.uint64), COLOUR),
    ],
)
def test_the_layouts_agree(tmp_path: Path, array: np.ndarray, images: np.ndarray):
    rows, labels = read_arrays(saved(tmp_path, array))
    assert rows.dtype == torch.uint8
    assert rows.is_contiguous()
    assert np.array_equal(rows.numpy(), images)
    assert labels is None


def test_where_both_axes_could_be_channels_the_last_one_is(tmp_path: Path):
    array = RNG.integers(0, 256, (2, 3, 8, 3), dtype=np.uint8)
    assert torch.equal(read_arrays(saved(tmp_path, array))[0], torch.from_numpy(array).permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (COLOUR / 255, "save them as uint8, times 255 and rounded if they are from 0 to 1; got float64"),
        (COLOUR > 9, "Expected integers from 0 to 255 in"),
        (COLOUR.astype(complex), "Expected integers"),
        (COLOUR.astype(int) - 1, "got -1 to 254"),
        (COLOUR.astype(int) + 1, "to 256"),
        (COLOUR[0, 0], "got (5, 6)"),
        (COLOUR[:, :2], "got (4, 2, 5, 6)"),
        (COLOUR[:0], "got (0, 3, 5, 6)"),
        (COLOUR[..., :0], "got (4, 3, 5, 0)"),
        (np.array("text"), "got ()"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, array: np.ndarray, message: str):
    with pytest.raises(DataError) as caught:
        read_arrays(saved(tmp_path, array))
    assert message in str(caught.value)
    assert "x.npy" in str(caught.value)


def test_values_are_below_the_levels(tmp_path: Path):
    path = saved(tmp_path, GREY % 16)
    assert int(read_arrays(path, levels=16)[0].max()) == 15
    with pytest.raises(DataError, match=r"Expected integers from 0 to 14 in .*x\.npy; got 0 to 15"):
        read_arrays(path, levels=15)


def test_two_levels(tmp_path: Path):
    """False and true are levels, too; of floats the advice is one that leads to such an array."""
    white = GREY > 99
    assert np.array_equal(read_arrays(saved(tmp_path, white), levels=2)[0].squeeze(1).numpy(), white.squeeze())
    with pytest.raises(DataError, match=r"save them as uint8, rounded if they are from 0 to 1; got float64"):
        read_arrays(saved(tmp_path, white * 1.0), levels=2)
    with pytest.raises(DataError, match=r"save them as uint8, times 16 and rounded if they are from 0 to 1"):
        read_arrays(saved(tmp_path, white * 1.0), levels=17)


@pytest.mark.parametrize(
    ("arrays", "labelled"),
    [
        ({"anything": COLOUR}, False),
        ({"anything": COLOUR, "labels": np.arange(4)}, True),
        ({"images": COLOUR, "other": GREY}, False),
        ({"x_train": COLOUR, "y_train": np.arange(4).reshape(4, 1), "x_test": GREY, "y_test": np.arange(4)}, True),
    ],
)
def test_the_arrays_of_an_npz_file(tmp_path: Path, arrays: dict[str, np.ndarray], labelled: bool):
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    rows, labels = read_arrays(tmp_path / "x.npz")
    assert np.array_equal(rows.numpy(), COLOUR)
    assert (labels is not None) == labelled
    assert labels is None or labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "Expected an array called images in"),
        ({"a": COLOUR, "b": COLOUR}, "got a, b"),
        ({"labels": np.arange(4)}, "got labels"),
        ({"images": COLOUR, "labels": np.arange(3)}, "Expected 4 integer labels in"),
        ({"images": COLOUR, "labels": np.ones(4)}, "got float64 of shape (4,)"),
        ({"images": COLOUR, "labels": np.array([0, 1, -1, 0])}, "got -1 to 1"),
        ({"images": COLOUR, "labels": np.array([0, 1, 10**9, 0])}, "got 0 to 1000000000"),
    ],
)
def test_other_npz_files_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError) as caught:
        read_arrays(tmp_path / "x.npz")
    assert message in str(caught.value)


def test_objects_are_never_unpickled(tmp_path: Path):
    np.savez(tmp_path / "x.npz", images=np.array([{}], dtype=object))
    (tmp_path / "x.npy").write_bytes(pickle.dumps(COLOUR))
    for path in (tmp_path / "x.npz", tmp_path / "x.npy"):
        with pytest.raises(DataError, match=r"Expected an array of images in .*; got: Python objects"):
            read_arrays(path)


@given(
    packed=st.sampled_from(["npy", "npz", "compressed"]),
    flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 255)), max_size=3),
    cut=st.integers(0, 400),
)
def test_damage_is_refused_or_leaves_images(
    tmp_path_factory: pytest.TempPathFactory, packed: str, flips: list[tuple[int, int]], cut: int
):
    buffer = io.BytesIO()
    if packed == "npy":
        np.save(buffer, COLOUR)
    else:
        write = np.savez if packed == "npz" else np.savez_compressed
        write(buffer, images=COLOUR, labels=np.arange(4))
    content = bytearray(buffer.getvalue())
    for position, value in flips:
        content[position % len(content)] ^= value
    path = tmp_path_factory.getbasetemp() / ("damaged.npy" if packed == "npy" else "damaged.npz")
    path.write_bytes(content[: len(content) - cut])
    try:
        rows, _ = read_arrays(path)
    except DataError as error:
        message = str(error)
    else:
        assert rows.ndim == 4
        assert rows.dtype == torch.uint8
        return
    assert str(path) in message
    assert "\n" not in message
