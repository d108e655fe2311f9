"""Whatever is in a file: it is used as it is, or refused with a sentence."""

import copy
import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from expmflow.data import DataError, load_table
from expmflow.runs.pretrained import load, save_pretrained
from expmflow.training.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from expmflow.training.config import Config, ConfigError, load_config, parse_config, presets

PRESETS = {name: OmegaConf.to_container(OmegaConf.create(text)) for name, text in presets().items()}
KEYS = ["data", "model", "optim", "train", "steps", "lr", "name", "path", "betas", "kind", "hidden", "seed", ""]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(KEYS)
keys = st.sampled_from(KEYS) | st.text(max_size=6) | st.integers(-3, 3)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


def accepted_or_refused(config: Any) -> None:
    try:
        parsed = parse_config(config)
    except ConfigError as error:
        assert str(error).startswith("Expected a ")  # noqa: PT017
        return
    assert parse_config(parsed.model_dump(mode="json")) == parsed


@given(values)
@settings(max_examples=150)
def test_any_values_are_a_config_or_a_sentence(config: Any):
    accepted_or_refused(config)


@given(st.sampled_from(sorted(PRESETS)), st.data())
@settings(max_examples=150)
def test_mutated_presets_are_a_config_or_a_sentence(name: str, data: st.DataObject):
    config = copy.deepcopy(PRESETS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        section = data.draw(st.sampled_from(sorted(config)))
        if isinstance(config[section], dict) and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(map(str, config[section])) or ["x"]) | keys)
            config[section][key] = data.draw(values)
        else:
            config[section] = data.draw(values)
    accepted_or_refused(config)


@given(st.sampled_from(sorted(presets())), st.data())
@settings(max_examples=100)
def test_mutated_text_is_a_config_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
):
    content = mutated(presets()[name].encode(), data)
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_bytes(content)
    try:
        assert isinstance(load_config(str(path)), Config)
    except ConfigError as error:
        assert str(error).startswith("Expected a ")  # noqa: PT017


@given(st.lists(st.text(max_size=12) | st.sampled_from(["train.steps=${x}", "a[0]=1", "train.=1", ".=.", "train={"])))
@settings(max_examples=100)
def test_any_overrides_are_a_config_or_a_sentence(overrides: list[str]):
    try:
        assert isinstance(load_config("moons", overrides), Config)
    except ConfigError as error:
        assert str(error).startswith("Expected a")  # noqa: PT017


# --- tables ----------------------------------------------------------------------------------------------------------

POINTS = torch.linspace(-1, 1, 10).reshape(5, 2)
ROWS = np.arange(12.0).reshape(4, 3) / 7


def mutated(content: bytes, data: st.DataObject) -> bytes:
    """The bytes with a few of them changed, left out, put in, or cut off."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(len(changed) - 1, 0)))
        match data.draw(st.sampled_from(["change", "remove", "insert", "cut"])):
            case "change" if changed:
                changed[place] = data.draw(st.integers(0, 255))
            case "remove" if changed:
                del changed[place]
            case "insert":
                changed.insert(place, data.draw(st.integers(0, 255)))
            case "cut":
                del changed[place:]
    return bytes(changed)


def table_or_sentence(path: Path) -> None:
    try:
        table = load_table(path)
    except DataError as error:
        assert str(error).startswith("Expected ")  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert table.rows.ndim == 2
    assert table.rows.dtype == torch.float64
    assert bool(table.rows.isfinite().all())
    assert len(set(table.names)) in (0, table.rows.shape[1])


def csv_bytes() -> bytes:
    return ("a,b,c\n" + "\n".join(",".join(map(str, row)) for row in ROWS.tolist())).encode()


def npy_bytes() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, ROWS)
    return buffer.getvalue()


@pytest.mark.parametrize(("suffix", "content"), [("csv", csv_bytes()), ("npy", npy_bytes())])
@given(data=st.data())
@settings(max_examples=200)
def test_mutated_tables_are_rows_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes, data: st.DataObject
):
    path = tmp_path_factory.getbasetemp() / f"mutated.{suffix}"
    path.write_bytes(mutated(content, data))
    table_or_sentence(path)


@pytest.mark.parametrize("suffix", ["csv", "npy"])
@given(content=st.binary(max_size=200) | st.binary(max_size=100).map(lambda rest: b"\x93NUMPY\x01\x00" + rest))
@settings(max_examples=150)
def test_any_bytes_are_rows_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes):
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    path.write_bytes(content)
    table_or_sentence(path)


@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2), min_size=1)
)
@settings(max_examples=50)
def test_a_table_reads_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, rows: list[list[float]]):
    path = tmp_path_factory.getbasetemp() / "written.csv"
    path.write_text("\n".join(",".join(map(repr, row)) for row in rows))
    assert load_table(path).rows.tolist() == rows


# --- checkpoints and weights -----------------------------------------------------------------------------------------


def flipped_or_cut(path: Path, data: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path.write_bytes(content)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2, dtype=torch.float64)}
    state = {"best": 0.5, "best_step": 2, "stale": 0, "skipped": 0}
    kept = Checkpoint(3, {"model": tensors, "optimizer": {"step/weight": torch.tensor(3.0)}}, state)
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints"), kept)


@given(data=st.data())
@settings(max_examples=250)
def test_a_damaged_checkpoint_is_refused_or_unchanged(checkpoint: Path, data: st.DataObject):
    whole = load_checkpoint(checkpoint)
    damaged = checkpoint.with_name("damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(checkpoint, damaged)
    flipped_or_cut(damaged / data.draw(st.sampled_from(sorted(os.listdir(damaged)))), data)
    try:
        found = load_checkpoint(damaged)
    except CheckpointError as error:
        assert "damaged" in str(error)  # noqa: PT017
        return
    # a blank in the manifest, for one, may change without changing what it says
    assert (found.step, found.state) == (whole.step, whole.state)
    assert all(same(found.tensors[group], whole.tensors[group]) for group in whole.tensors)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from expmflow.models import dense_flow

    folder = tmp_path_factory.mktemp("pretrained")
    config = parse_config({"model": {"blocks": 1, "hidden": 4}})
    save_pretrained((dense_flow(2, blocks=1, hidden=4), config, (2,)), folder)
    return folder


@given(data=st.data())
@settings(max_examples=150)
def test_damaged_weights_are_refused_or_unchanged(pretrained: Path, data: st.DataObject):
    whole = load(pretrained).state_dict()
    damaged = pretrained.with_name("damaged-weights")
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(pretrained, damaged)
    flipped_or_cut(damaged / "model.safetensors", data)
    try:
        found = load(damaged).state_dict()
    except CheckpointError as error:
        assert "damaged-weights" in str(error)  # noqa: PT017
        return
    assert same(found, whole)


@given(data=st.data())
@settings(max_examples=100)
def test_a_damaged_run_config_is_refused_or_a_config(pretrained: Path, data: st.DataObject):
    damaged = pretrained.with_name("damaged-config")
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(pretrained, damaged)
    flipped_or_cut(damaged / "config.json", data)
    try:
        model = load(damaged)
    except (CheckpointError, ConfigError) as error:
        assert str(error).startswith("Expected ")  # noqa: PT017
        return
    assert same(model.state_dict(), load(pretrained).state_dict())
    assert torch.equal(model(POINTS), load(pretrained)(POINTS))
