"""The loop: what it resumes, what it refuses, how it stops."""

import copy
import errno
import json
import math
import os
import shutil
import signal
from pathlib import Path

import image_run
import numpy as np
import pytest
import torch

from expmflow.data import DataError
from expmflow.distributions import Density, NonFiniteError
from expmflow.models import image_flow
from expmflow.runs.evaluation import open_run
from expmflow.runs.pretrained import load, save_pretrained
from expmflow.training import checkpoint as checkpoint_module
from expmflow.training.build import build_model
from expmflow.training.checkpoint import CheckpointError, list_checkpoints, newest_checkpoint, save_checkpoint
from expmflow.training.config import ConfigError, load_config, parse_config
from expmflow.training.loop import train
from expmflow.training.run import RunFolder
from expmflow.training.validation import TrainingError

MOONS = ["data.samples=400", "model.blocks=1", "model.hidden=8", "train.batch_size=32", "train.log_every=1"]


def config(*overrides: str):
    small = ["train.steps=6", "train.validate_every=2", "train.checkpoint_every=2"]
    return load_config("moons", [*MOONS, *small, *overrides])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = newest_checkpoint(folder / "checkpoints")
    assert found is not None
    return found.tensors["model"]


def test_a_run_in_two_parts_equals_one(tmp_path: Path) -> None:
    train(config(), tmp_path / "whole")
    train(config("train.steps=3"), tmp_path / "parts")
    train(config(), tmp_path / "parts")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    train(config(), tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    train(config(), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_another_config_is_refused(tmp_path: Path) -> None:
    train(config("train.steps=2"), tmp_path)
    with pytest.raises(ConfigError, match=r"Expected the config that the run .* began with; got another"):
        train(config("optim.lr=0.1"), tmp_path)


def test_what_is_returned_and_loaded_are_the_best_weights(tmp_path: Path) -> None:
    returned = train(config(), tmp_path)
    loaded = load(tmp_path)
    x = torch.randn(5, 2)
    assert torch.equal(returned.log_prob(x), loaded.log_prob(x))
    validated = [m for m in RunFolder(tmp_path).read_metrics() if "validation_nll" in m]
    assert [m["step"] for m in validated] == [2, 4, 6]
    best = min(m["validation_nll"] for m in validated)
    assert [m["validation_nll"] for m in validated if m["best"]][-1] == best


def test_metrics_are_trimmed_to_the_checkpoint(tmp_path: Path) -> None:
    train(config("train.steps=4"), tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, "nll": 0.0}) + '\n{"step": 6, "nl')
    train(config(), tmp_path)
    logged = [m["step"] for m in RunFolder(tmp_path).read_metrics() if "nll" in m]
    assert logged == [1, 2, 3, 4, 5, 6]


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path, caplog) -> None:
    train(config(), tmp_path / "a")
    train(config("train.steps=4"), tmp_path / "b")
    newest = list_checkpoints(tmp_path / "b" / "checkpoints")[0]
    damaged = newest / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    train(config(), tmp_path / "b")
    assert str(damaged) in caplog.text
    whole, resumed = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch) -> None:
    train(config("train.steps=2"), tmp_path)
    before = weights(tmp_path)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_tensors", full)
        with pytest.raises(OSError, match="No space left"):
            train(config(), tmp_path)
    after = weights(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(config(), tmp_path / "whole")
    train(config(), tmp_path)
    assert all(torch.equal(v, weights(tmp_path)[n]) for n, v in weights(tmp_path / "whole").items())


class Wrapped(Density):
    """A density around another."""

    def __init__(self, model: Density, at: set[int]) -> None:
        super().__init__()
        self.model = model
        self.at = at
        self.calls = 0

    @property
    def event_shape(self):
        return self.model.event_shape

    @property
    def draws(self):
        return self.model.draws

    def forward(self, x, context=None, *, noise=None):
        return self.model(x, context, noise=noise)

    def sample(self, n, context=None, *, temperature=1.0, noise=None):
        return self.model.sample(n, context, temperature=temperature, noise=noise)

    def description(self):
        return self.model.description()


class Breaking(Wrapped):
    """Turns a weight into NaN at given steps, as a diverging run does."""

    def forward(self, x, context=None, *, noise=None):
        self.calls += self.training
        shift = self.model.flow.transform.layers[0].shift
        if self.training and self.calls in self.at:
            with torch.no_grad():
                kept = shift.clone()
                shift.fill_(float("nan"))
            try:
                return self.model(x, noise=noise)
            finally:
                with torch.no_grad():
                    shift.copy_(kept)
        return self.model(x, noise=noise)


def test_a_loss_that_is_not_finite_stops_with_its_layer(tmp_path: Path) -> None:
    model = Breaking(image_run.make_model(), {5})
    with pytest.raises(
        TrainingError, match=r"at step 5; got NaN .*layers\.0 \(ActNorm\); the last good .*step-00000003"
    ):
        train(image_run.make_config(), tmp_path, model=model, data=image_run.make_data())


def test_or_is_skipped_and_counted(tmp_path: Path) -> None:
    model = Breaking(image_run.make_model(), {2, 5})
    settings = image_run.make_config(steps=6, on_nonfinite="skip")
    train(settings, tmp_path, model=model, data=image_run.make_data())
    assert RunFolder(tmp_path).read_metrics()[-2]["skipped"] == 2
    assert all(torch.isfinite(v).all() for v in weights(tmp_path).values())


class BlindAt(Wrapped):
    """Cannot tell a likelihood in the validations of given numbers, counted from 1."""

    def __init__(self, model: Density, at: set[int]) -> None:
        super().__init__(model, at)
        self.validations = [0]  # shared with the copies that are validated

    def __deepcopy__(self, memo):
        again = BlindAt(copy.deepcopy(self.model, memo), self.at)
        again.validations = self.validations
        return again

    def forward(self, x, context=None, *, noise=None):
        if not self.training:
            self.validations[0] += 1
            if self.validations[0] in self.at:
                raise NonFiniteError("Expected a finite result; got NaN.", "transform.layers.1 (LinearExp)")
        return self.model(x, context, noise=noise)


def blind(settings, at: set[int]) -> BlindAt:
    return BlindAt(build_model(settings, (2,)), at)


ONE_BATCH = ("train.batch_size=40", "data.validation=0.1")  # a validation is one call of the model


def test_a_validation_that_is_not_finite_stops_with_its_layer(tmp_path: Path) -> None:
    settings = config(*ONE_BATCH)
    with pytest.raises(
        TrainingError,
        match=r"a finite validation at step 4; got NaN .*layers\.1 \(LinearExp\); the last good .*step-00000002",
    ):
        train(settings, tmp_path, model=blind(settings, {2}))


def test_or_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = config(*ONE_BATCH, "train.on_nonfinite=skip")
    train(settings, tmp_path, model=blind(settings, {2}))
    first, second, third = (m for m in RunFolder(tmp_path).read_metrics() if "validation_nll" in m)
    assert [m["step"] for m in (first, second, third)] == [2, 4, 6]
    assert math.isnan(second["validation_nll"])
    assert (first["best"], second["best"]) == (True, False)
    assert "nonfinite_validations" not in first
    assert second["nonfinite_validations"] == third["nonfinite_validations"] == 1
    assert math.isfinite(third["validation_nll"])
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():  # for readers that take JSON at its word
        json.loads(line, parse_constant=pytest.fail)


def test_validations_that_are_not_finite_use_up_the_patience(tmp_path: Path) -> None:
    settings = config(*ONE_BATCH, "train.on_nonfinite=skip", "train.patience=2", "train.steps=20")
    train(settings, tmp_path, model=blind(settings, {2, 3}))
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert (found.step, found.state["stale"], found.state["nonfinite_validations"]) == (6, 2, 2)
    assert found.state["best_step"] == 2


def test_without_any_finite_validation_there_is_nothing_to_return(tmp_path: Path) -> None:
    settings = config(*ONE_BATCH, "train.on_nonfinite=skip")
    with pytest.raises(TrainingError, match=r"Expected a validation that is finite; got 3 that were not\."):
        train(settings, tmp_path, model=blind(settings, {1, 2, 3}))


def test_a_checkpoint_without_that_count_is_resumed(tmp_path: Path) -> None:
    train(config("train.steps=4"), tmp_path)
    older = newest_checkpoint(tmp_path / "checkpoints")
    assert older is not None
    del older.state["nonfinite_validations"]
    save_checkpoint(tmp_path / "checkpoints", older)
    train(config(), tmp_path)
    assert RunFolder(tmp_path).read_metrics()[-1]["step"] == 6


def test_samples_that_cannot_be_drawn_are_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    def cannot(*arguments: object, **settings: object) -> None:
        raise NonFiniteError("Expected a finite result; got NaN.", "base")

    monkeypatch.setattr("expmflow.training.loop.draw", cannot)
    train(config("train.sample_every=3"), tmp_path)
    assert "No samples at step 3: Expected a finite result; got NaN." in caplog.text


def test_every_step_is_told(tmp_path: Path) -> None:
    told: list[int] = []
    train(config("train.steps=3", "train.log_every=100"), tmp_path, on_step=told.append)
    train(config("train.log_every=100"), tmp_path, on_step=told.append)
    assert told == [1, 2, 3, 4, 5, 6]


def test_ctrl_c_saves_and_ends(tmp_path: Path) -> None:
    def interrupt(record: dict[str, object]) -> None:
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config("train.checkpoint_every=100"), tmp_path, report=interrupt)
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found.step == 3
    train(config("train.checkpoint_every=100"), tmp_path)
    train(config(), tmp_path / "whole")
    assert all(torch.equal(v, weights(tmp_path)[n]) for n, v in weights(tmp_path / "whole").items())


def test_samples_at_intervals_are_the_same_in_a_resumed_run(tmp_path: Path) -> None:
    whole: dict[int, torch.Tensor] = {}
    parts: dict[int, torch.Tensor] = {}
    train(config("train.sample_every=2"), tmp_path / "whole", on_samples=whole.__setitem__)
    train(config("train.sample_every=2", "train.steps=3"), tmp_path / "parts", on_samples=parts.__setitem__)
    train(config("train.sample_every=2"), tmp_path / "parts", on_samples=parts.__setitem__)
    assert list(whole) == [2, 4, 6]
    assert all(torch.equal(whole[step], parts[step]) for step in whole)


def test_early_stopping(tmp_path: Path) -> None:
    settings = config("train.steps=40", "train.patience=2", "optim.lr=5.0", "optim.warmup=0", "optim.clip=null")
    train(settings, tmp_path)
    validated = [m for m in RunFolder(tmp_path).read_metrics() if "validation_nll" in m]
    assert len(validated) < 20
    assert [m["best"] for m in validated[-2:]] == [False, False]
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found.step == validated[-1]["step"]


def test_starting_from_another_run(tmp_path: Path) -> None:
    train(config(), tmp_path / "first")
    train(
        config("train.steps=1", "optim.lr=1e-12", "optim.ema=null"), tmp_path / "second", init_from=tmp_path / "first"
    )
    first, second = load(tmp_path / "first").state_dict(), load(tmp_path / "second").state_dict()
    for name in first:
        if "parametrizations" not in name or "original" in name:
            torch.testing.assert_close(first[name], second[name])


def test_starting_from_another_architecture_is_refused(tmp_path: Path) -> None:
    train(config("train.steps=2"), tmp_path / "first")
    with pytest.raises(CheckpointError, match=r"Expected the weights in .*first.* to fit the model; got:"):
        train(config("model.hidden=16"), tmp_path / "second", init_from=tmp_path / "first")


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    for settings, start in ((["model.hidden=16"], tmp_path / "nowhere"), (["data.path=t.csv"], None)):
        with pytest.raises((CheckpointError, DataError)):
            train(config(*settings), tmp_path / "run", init_from=start)
    assert list(tmp_path.iterdir()) == []


def test_without_a_whole_checkpoint_nothing_is_overwritten(tmp_path: Path) -> None:
    train(config(), tmp_path)
    for path in list_checkpoints(tmp_path / "checkpoints"):
        (path / "manifest.json").write_text("{")
    before = {name: (tmp_path / name).read_bytes() for name in ("model.safetensors", "metrics.jsonl")}
    with pytest.raises(
        CheckpointError, match=r"Expected JSON in .*manifest\.json.*There is no other; choose a new folder"
    ):
        train(config(), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_weights_without_checkpoints_are_set_aside(tmp_path: Path) -> None:
    train(config(), tmp_path / "run")
    save_pretrained(tmp_path / "run", tmp_path / "kept")
    before = (tmp_path / "kept" / "model.safetensors").read_bytes()
    train(config("train.steps=2"), tmp_path / "kept")
    assert (tmp_path / "kept" / "model.before.safetensors").read_bytes() == before
    assert RunFolder(tmp_path / "kept").read_metrics()[-1]["step"] == 2


def test_copies_of_checkpoints_are_left_alone(tmp_path: Path) -> None:
    train(config("train.steps=4"), tmp_path)
    newest, _ = list_checkpoints(tmp_path / "checkpoints")
    copies = [newest.with_name(f"{newest.name}.bak{k}") for k in (1, 2)]
    for copied in copies:
        shutil.copytree(newest, copied)
    train(config(), tmp_path)
    assert list_checkpoints(tmp_path / "checkpoints")[0].name == "step-00000006"
    assert all(copied.is_dir() for copied in copies)


def test_other_data_than_a_run_began_with_is_a_warning(tmp_path: Path, caplog) -> None:
    rows = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)).numpy()
    np.save(tmp_path / "t.npy", rows)
    settings = load_config("table", [f"data.path={tmp_path / 't.npy'}", *MOONS[1:], "train.steps=2"])
    train(settings, tmp_path / "run")
    open_run(tmp_path / "run").data()
    assert not caplog.records
    np.save(tmp_path / "t.npy", np.concatenate([rows, rows[:1]]))
    open_run(tmp_path / "run").data()
    assert "The data is not what it was when the run in" in caplog.text
    caplog.clear()
    train(settings.model_copy(update={"train": settings.train.model_copy(update={"steps": 3})}), tmp_path / "run")
    assert "The data is not what it was when the run in" in caplog.text


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected a batch of at most 320 rows.*; got 1000"):
        train(config("train.batch_size=1000"), tmp_path)
    assert not tmp_path.joinpath("config.json").exists()


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    train(config("train.steps=150", "train.validate_every=50", "train.checkpoint_every=150"), tmp_path)
    losses = [m["nll"] for m in RunFolder(tmp_path).read_metrics() if "nll" in m]
    assert sum(losses[-20:]) / 20 < sum(losses[:20]) / 20 - 0.1


def test_parse_config_knows_the_defaults() -> None:
    assert parse_config({}).train.steps == 2000


def test_a_model_is_saved_with_the_config_that_describes_it(tmp_path: Path) -> None:
    settings: dict[str, object] = {"levels": 1, "subflows": 1, "hidden": 8}
    model = image_flow((1, 4, 4), grey_levels=17, **settings).eval()  # type: ignore[arg-type]
    described = parse_config({"data": {"name": "digits"}, "model": {"kind": "image", **settings}})
    save_pretrained((model, described, (1, 4, 4)), tmp_path)
    x, noise = torch.randint(17, (3, 1, 4, 4)), torch.rand(3, 1, 4, 4)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(x, noise=noise), model(x, noise=noise))
    for wrong, message in (
        ({"grey_levels": 256}, "Expected model.grey_levels=17"),
        ({"hidden": 4}, "describes the model"),
    ):
        other = parse_config({"data": {"name": "digits"}, "model": {"kind": "image", **settings, **wrong}})
        with pytest.raises(ConfigError, match=message):
            save_pretrained((model, other, (1, 4, 4)), tmp_path)
