"""Models of images and of graphs in configs and in the loop: what fits what, and runs that resume to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expmflow.data import Dataset
from expmflow.data.graphs import MIXTURES
from expmflow.runs.pretrained import load
from expmflow.training.build import build_model, resolve
from expmflow.training.checkpoint import newest_checkpoint
from expmflow.training.config import Config, ConfigError, parse_config
from expmflow.training.distributed import Processes
from expmflow.training.job import Run
from expmflow.training.loop import train
from expmflow.training.model_config import MODELS
from expmflow.training.run import RunFolder

LEVELS, CLASSES = 17, 3
KINDS = {"dense": "moons", "graph": "mog-4", "image": "digits", "vae": "digits", "vector-vae": "moons"}
FITTING = {"vectors": ("table", "dense", "vector-vae"), "graphs": ("graph",), "images": ("image", "vae")}


def pictures(*, labels: bool = True, levels: int | None = LEVELS) -> Dataset:
    """Integer images, brighter from left to right, each class at a brightness of its own."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (40,), generator=generator)
    ramp = torch.arange(4) + torch.randint(3, (40, 1, 4, 4), generator=generator)
    rows = (ramp + 4 * classes[:, None, None, None]).clamp(0, LEVELS - 1)
    parts = rows[:24], rows[24:32], rows[32:]
    if not labels:
        return Dataset(*parts, levels=levels, kind="images")
    known = (classes[:24], classes[24:32], classes[32:])
    return Dataset(*parts, labels=known, classes=CLASSES, levels=levels, kind="images")


def graphs() -> Dataset:
    mixture = MIXTURES["mog-4"]
    fixed = [mixture.sample(n, torch.Generator().manual_seed(n)) for n in (32, 16, 8)]
    return Dataset(*fixed, draw=mixture.sample, kind="graphs")


def config(kind: str, *, data: dict | None = None, train: dict | None = None, **model) -> Config:
    flow = {"flows": 2, "hidden": 4, "context": 2}
    small = {
        "dense": {"blocks": 1, "hidden": 4},
        "image": {"levels": 1, "subflows": 1, "growth": 3, "depth": 1, "hidden": 4, "dequantization_subflows": 1},
        "graph": {"subflows": 1, "hidden": 4},
        "vae": {"latents": 3, **flow, "channels": 2, "growth": 2, "depth": 1, "features": 4},
        "vector-vae": flow,
    }
    steps = {"steps": 4, "batch_size": 8, "log_every": 1, "validate_every": 2, "checkpoint_every": 2}
    return parse_config(
        {
            "data": {"name": KINDS[kind], **(data or {})},
            "model": {"kind": kind, **small[kind], **model},
            "optim": {"lr": 0.01, "ema": 0.9},
            "train": {**steps, "threads": 1, **(train or {})},
        }
    )


class TestResolve:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("shape", "name"), [((2,), "vectors"), ((4, 2), "graphs"), ((1, 4, 4), "images")])
    def test_a_model_fits_one_kind_of_data(self, kind, shape, name):
        rows = torch.zeros(3, *shape)
        data = Dataset(rows, rows, rows, kind=name)
        fitting = " or ".join(FITTING[name])
        if kind in FITTING[name]:
            assert resolve(config(kind), data).model.kind == kind
            return
        expected = rf"^Expected a model of kind {fitting} for the data {KINDS[kind]}; got model\.kind={kind}\.$"
        with pytest.raises(ConfigError, match=expected):
            resolve(config(kind), data)

    @pytest.mark.parametrize("kind", ["vectors", "graphs", "images"])
    def test_events_that_are_none_of_their_kind(self, kind):
        rows = torch.zeros(3, 1, 2, 2, 2)
        with pytest.raises(ValueError, match=rf"Expected {kind} of shape .*; got events of shape \(1, 2, 2, 2\)\."):
            resolve(config("image"), Dataset(rows, rows, rows, kind=kind))

    def test_what_the_data_knows_is_filled_in(self):
        found = resolve(config("image"), pictures()).model
        assert (found.grey_levels, found.classes) == (LEVELS, None)
        found = resolve(config("image", conditional=True), pictures()).model
        assert (found.grey_levels, found.classes) == (LEVELS, CLASSES)
        found = resolve(config("image", conditional=True, grey_levels=LEVELS, classes=CLASSES), pictures()).model
        assert (found.grey_levels, found.classes) == (LEVELS, CLASSES)

    def test_what_only_the_config_knows_is_kept(self):
        found = resolve(config("image", grey_levels=20), pictures(levels=None)).model
        assert found.grey_levels == 20

    @pytest.mark.parametrize(
        ("model", "expected"),
        [
            ({"grey_levels": 16}, r"Expected model\.grey_levels=17, as the data has; got 16\."),
            ({"conditional": True, "classes": 4}, r"Expected model\.classes=3, as the data has; got 4\."),
            ({"classes": 3}, r"Expected model\.conditional=true for model\.classes; got false\."),
        ],
    )
    def test_what_the_data_contradicts_is_refused(self, model, expected):
        with pytest.raises(ConfigError, match=expected):
            resolve(config("image", **model), pictures())

    def test_classes_need_labels(self):
        with pytest.raises(ConfigError, match=r"Expected data with classes for model\.conditional=true; got none\."):
            resolve(config("image", conditional=True), pictures(labels=False))

    @pytest.mark.parametrize("kind", ["dense", "graph", "vae"])
    def test_only_images_are_flipped(self, kind):
        of_kind = {"dense": ((2,), "vectors"), "graph": ((4, 2), "graphs"), "vae": ((1, 4, 4), "binary images")}
        shape, name = of_kind[kind]
        rows = torch.zeros(3, *shape)
        data = Dataset(rows, rows, rows, kind=name)
        with pytest.raises(ConfigError, match=rf"Expected no data\.flip for {name}, only for images; got True\."):
            resolve(config(kind, data={"flip": True}), data)
        with pytest.raises(ConfigError, match=rf"Expected no data\.shift for {name}, only for images; got 2\."):
            resolve(config(kind, data={"shift": 2}), data)


class TestConfig:
    def problems(self, model: object) -> str:
        with pytest.raises(ConfigError) as caught:
            parse_config({"model": model})
        return str(caught.value)

    @pytest.mark.parametrize(
        ("model", "key", "near"),
        [
            ({"kind": "image", "subflw": "coupling"}, "subflw", "subflow"),
            ({"kind": "graph", "netwrk": "gnf"}, "netwrk", "network"),
            ({"kind": "dense", "blcks": 1}, "blcks", "blocks"),
            ({"hiden": 1}, "hiden", "hidden"),
        ],
    )
    def test_a_misspelt_key_names_the_nearest_of_its_kind(self, model, key, near):
        text = self.problems(model)
        assert text == f"Expected a valid config; got 1 problem:\n  model.{key}: no such key (did you mean '{near}'?)"

    def test_a_key_of_another_kind_is_none_of_this(self):
        assert "model.blocks: no such key" in self.problems({"kind": "image", "blocks": 2})

    def test_a_value_that_is_none_names_those_that_are(self):
        text = self.problems({"kind": "graph", "network": "gcn"})
        assert "  model.network: input should be 'coupling', 'gnf', 'gnf-exp' or 'sorted', got 'gcn'" in text

    @pytest.mark.parametrize(("kind", "hint"), [("imag", " (did you mean 'image'?)"), ("xyz", "")])
    def test_an_unknown_kind(self, kind, hint):
        text = self.problems({"kind": kind})
        assert text.endswith(f"  model.kind: input should be one of {', '.join(MODELS)}, got '{kind}'{hint}")

    @pytest.mark.parametrize("kind", [None, 3, [1], {"a": 1}, True])
    def test_a_kind_that_is_no_word(self, kind):
        assert f"model.kind: input should be one of {', '.join(MODELS)}, got" in self.problems({"kind": kind})

    @pytest.mark.parametrize("model", [3, "image", [1], None])
    def test_a_model_that_is_no_section(self, model):
        assert "\n  model: input should be a section, got" in self.problems(model)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_config_is_its_own_json(self, kind):
        made = config(kind)
        assert parse_config(made.model_dump(mode="json")) == made


def warmed(settings: Config) -> Config:
    """With a KL part that takes three steps to its full weight."""
    return settings.model_copy(update={"optim": settings.optim.model_copy(update={"kl_warmup": 3})})


RUNS = {
    "image": (config("image", subflow="coupling"), pictures),
    "image, all of it": (
        config("image", data={"flip": True}, conditional=True, dequantization="variational", mixing="convexp"),
        pictures,
    ),
    "graph": (config("graph"), graphs),
    "graph, mlp": (config("graph", network="coupling"), graphs),
    **{f"vae, {name}": (config("vae", posterior=name), pictures) for name in ("householder", "conv-sylvester")},
    "vae, iaf, warm-up": (warmed(config("vae", posterior="iaf")), pictures),
}


class TestRuns:
    @pytest.mark.parametrize("name", RUNS)
    def test_are_the_same_in_parts(self, tmp_path: Path, name):
        """Cut between two checkpoints: weights, averages, the optimizer and what was logged agree to the last bit."""
        settings, data = RUNS[name]
        model = train(settings, tmp_path / "whole", data=data())
        half = settings.model_copy(update={"train": settings.train.model_copy(update={"steps": 3})})
        train(half, tmp_path / "parts", data=data())
        train(settings, tmp_path / "parts", data=data())
        whole, parts = (newest_checkpoint(tmp_path / place / "checkpoints") for place in ("whole", "parts"))
        assert whole is not None
        assert parts is not None
        assert whole.step == parts.step == 4
        for group, tensors in whole.tensors.items():
            for key, value in tensors.items():
                assert torch.equal(parts.tensors[group][key], value), (group, key)
        losses, again = (
            {m["step"]: m["nll"] for m in RunFolder(tmp_path / place).read_metrics() if "nll" in m}
            for place in ("whole", "parts")
        )
        assert list(losses) == [1, 2, 3, 4]
        assert losses == again
        loaded = load(tmp_path / "whole").state_dict()
        assert all(torch.equal(value, loaded[key]) for key, value in model.state_dict().items())

    def test_are_written_with_what_the_data_knows(self, tmp_path: Path):
        settings = config("image", conditional=True, train={"steps": 1})
        train(settings, tmp_path, data=pictures())
        written, event_shape = RunFolder(tmp_path).read_config()
        assert (written.model.grey_levels, written.model.classes, event_shape) == (LEVELS, CLASSES, (1, 4, 4))

    def test_pictures_of_samples(self, tmp_path: Path):
        """Of every kind of model, with classes too."""
        for name, (settings, data) in RUNS.items():
            shown: list[torch.Tensor] = []
            once = settings.train.model_copy(update={"steps": 1, "sample_every": 1})
            train(
                settings.model_copy(update={"train": once}),
                tmp_path / name,
                data=data(),
                on_samples=lambda step, samples, shown=shown: shown.append(samples),
            )
            (samples,) = shown
            assert samples.shape[1:] == data().event_shape

    def test_other_data_than_the_model_is_for_is_refused_before_anything_is_written(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="Expected a model of kind image or vae"):
            train(config("graph"), tmp_path / "run", data=pictures())
        assert not (tmp_path / "run").exists()


class TestBatches:
    """What one process sees is what two see together."""

    def batches(self, settings: Config, data: Dataset, step: int, count: int):
        settings = resolve(settings, data)
        found = []
        for rank in range(count):
            run = Run(settings, data, RunFolder(Path("nowhere")), Processes(rank, count), torch.device("cpu"))
            found.append(run.batch(step))
        return found

    @pytest.mark.parametrize("name", ["image, all of it", "graph"])
    @pytest.mark.parametrize("count", [2, 4])
    def test_parts_make_the_whole(self, name, count):
        settings, data = RUNS[name]
        for step in range(5):
            ((rows, context),) = self.batches(settings, data(), step, 1)
            parts = self.batches(settings, data(), step, count)
            assert torch.equal(torch.cat([x for x, _ in parts]), rows)
            assert len(rows) == 8
            assert (context is None) == (name == "graph")
            if context is not None:
                assert torch.equal(torch.cat([c for _, c in parts]), context)

    def test_graphs_are_new_at_every_step_and_the_same_in_every_run(self):
        settings, data = RUNS["graph"]
        ((first, _),), ((second, _),) = (self.batches(settings, data(), step, 1) for step in (0, 1))
        assert not torch.equal(first, second)
        assert torch.equal(self.batches(settings, data(), 0, 1)[0][0], first)

    def test_images_are_flipped_or_not_and_keep_their_classes(self):
        """Each row is one of the training rows, or its mirror image, beside its own label; about half are turned."""
        settings, data = RUNS["image, all of it"]
        rows = data().train
        turned = 0
        for step in range(30):
            ((x, context),) = self.batches(settings, data(), step, 1)
            for image, told in zip(x, context, strict=True):
                same, mirrored = ((rows == view).flatten(1).all(1) for view in (image, image.flip(2)))
                assert (same | mirrored).any()
                turned += int(mirrored.any() and not same.any())
                labels = data().labels[0][same | mirrored]
                assert int(told.argmax()) in labels.tolist()
                assert told.sum() == 1
        assert 80 < turned < 160  # of 240

    def test_without_flips_images_are_left_alone(self):
        settings, data = config("image"), pictures()
        ((x, _),) = self.batches(settings, data, 0, 1)
        assert all((data.train == image).flatten(1).all(1).any() for image in x)


def test_weights_follow_from_the_seed():
    for kind, shape in (("image", (1, 4, 4)), ("graph", (4, 2))):
        torch.manual_seed(5)
        state = torch.get_rng_state()
        first, second = (build_model(config(kind), shape).state_dict() for _ in range(2))
        assert all(torch.equal(value, second[key]) for key, value in first.items())
        other = build_model(config(kind, train={"seed": 1}), shape).state_dict()
        assert any(not torch.equal(value, other[key]) for key, value in first.items())
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("limit", [None, 3, 1000])
def test_validation_is_on_so_many_rows(tmp_path, limit):
    """As if there were no others."""
    data, few = pictures(), {"steps": 1, "batch_size": 2}
    train(config("image", train={**few, "validation_rows": limit}), tmp_path / "limited", data=data)
    train(config("image", train=few), tmp_path / "cut", data=replace(data, validation=data.validation[:limit]))
    limited, cut = (RunFolder(tmp_path / name).read_metrics()[-1] for name in ("limited", "cut"))
    assert limited["validation_nll"] == cut["validation_nll"]
