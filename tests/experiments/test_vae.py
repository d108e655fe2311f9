"""The paper's table of VAEs: rows that differ in the posterior, trained, resumed, measured and compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_runs import Outcome, run_command
from expmflow.data import Dataset, binarized, images
from expmflow.distributions.describe import count_parameters
from expmflow.experiments.registry import EXPERIMENTS
from expmflow.experiments.vae import PAPER, POSTERIORS, VAE_TABLE
from expmflow.experiments.vae_table import flow_parameters, references
from expmflow.experiments.vae_text import MAIN
from expmflow.models import image_vae
from expmflow.models.posteriors import POSTERIORS as KNOWN
from expmflow.models.posteriors import FlowSettings, build_posterior
from expmflow.training.build import build_model

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def small_images(channels: int) -> Dataset:
    """Stripes of two kinds, 8 × 8 pixels."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(40, (60, channels, 8, 8), generator=generator)
    rows[::2, :, ::2] += 200
    rows[1::2, :, :, ::2] += 200
    rows = rows.to(torch.uint8)
    labels = tuple(torch.zeros(n, dtype=torch.int64) for n in (40, 8, 12))
    return Dataset(rows[:40], rows[40:48], rows[48:], labels=labels, classes=10, levels=256, kind="images")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.delenv("EXPMFLOW_DATA", raising=False)
    monkeypatch.setattr(binarized, "load_mnist", lambda name, folder, progress: small_images(1))
    monkeypatch.setattr(images, "load_cifar10", lambda folder, progress: small_images(3))
    laptop = VAE_TABLE.of_presets["laptop"]
    small = {"flows": 1, "hidden": 4, "context": 2, "reflections": 2, "channels": 2, "growth": 2, "depth": 1}
    settings = {
        name: replace(
            setting,
            model={**small, "features": 4, "components": 2},
            vectors={"latents": 3},
            maps={"latents": 2},
            optim={"lr": 0.01, "kl_warmup": 2, "decay": 0.5, "decay_every": 2},
            train={"steps": 4, "batch_size": 8, "log_every": 1, "validate_every": 2, "checkpoint_every": 2},
            weighed_images=5,
            samples=6,
        )
        for name, setting in laptop.settings.items()
    }
    monkeypatch.setitem(VAE_TABLE.of_presets, "laptop", replace(laptop, settings=settings))
    return monkeypatch


def reproduce(folder: Path, *arguments: str) -> Outcome:
    places = ("--runs", folder / "runs", "--results", folder / "results", "--threads", "1")
    return run_command("reproduce", "vae", *arguments, *places)


class TestRows:
    def test_every_row_of_the_paper_is_there(self):
        assert EXPERIMENTS["vae"] is VAE_TABLE
        names = {row.model for row in VAE_TABLE.rows("paper")}
        assert names == {f"{images}-{posterior}" for images, rows in PAPER.items() for posterior in rows}
        assert set(POSTERIORS) <= set(KNOWN)
        assert [set(rows) for rows in PAPER.values()] == [set(POSTERIORS)] * 2
        assert PAPER["cifar10"]["householder"] == (4.58, 0.001, 4.54, 0.001)  # each has its spread of three runs

    def test_what_the_laptop_runs(self):
        rows = VAE_TABLE.rows("laptop")
        seeds = {model: [r.seed for r in rows if r.model == model] for model in dict.fromkeys(r.model for r in rows)}
        twice = {"gaussian", "iaf", "householder", "sylvester"}
        for posterior in POSTERIORS:
            assert seeds[f"mnist-{posterior}"] == ([0, 1] if posterior in twice else [0])
        assert {model for model in seeds if model.startswith("cifar10")} == {
            f"cifar10-{posterior}" for posterior in ("gaussian", "conv-gaussian", "conv-iaf", "conv-sylvester")
        }

    @pytest.mark.parametrize("row", VAE_TABLE.rows("laptop"), ids=lambda row: row.name)
    def test_rows_differ_in_the_posterior_alone(self, row):
        first = next(r for r in VAE_TABLE.rows("laptop") if r.images == row.images)
        config, other = row.config("laptop"), first.config("laptop")
        assert config.model.posterior == row.posterior
        assert (config.data, config.optim) == (other.data, other.optim)
        assert config.train.model_copy(update={"seed": 0}) == other.train
        latents = {"posterior", "latents", "hidden", "context"}
        assert config.model.model_dump(exclude=latents) == other.model.model_dump(exclude=latents)

    @pytest.mark.parametrize("preset", ["laptop", "paper"])
    def test_rows_can_be_built(self, preset):
        for row in VAE_TABLE.rows(preset):
            if row.seed == 0 and row.posterior in ("planar", "conv-sylvester"):
                levels = 2 if row.images == "mnist" else 256
                config = row.config(preset)
                config = config.model_copy(update={"model": config.model.model_copy(update={"grey_levels": levels})})
                model = build_model(config, SHAPES[row.images])
                assert model.event_shape == SHAPES[row.images]

    def test_the_originals_schedule(self):
        config = VAE_TABLE.rows("paper")[0].config("paper")
        assert config.data.name == "binarized-mnist"
        assert (config.optim.optimizer, config.optim.lr, config.optim.eps) == ("adamax", 5e-4, 1e-7)
        assert (config.optim.kl_warmup, config.train.steps, config.train.batch_size) == (50_000, 1_000_000, 100)
        assert (config.model.latents, config.model.flows, config.model.hidden) == (64, 4, 320)

    @pytest.mark.parametrize("preset", VAE_TABLE.of_presets)
    def test_what_was_chosen_is_said_of_every_preset(self, preset):
        """And it is so: latents that are images, one basis for all images, gates of σ(2)."""
        choices = VAE_TABLE.of_presets[preset].choices
        maps = {row.images: row.config(preset).model.latents for row in VAE_TABLE.rows(preset) if "conv-" in row.model}
        if maps:  # rows of such latents
            assert f"{maps['mnist']} × 7 × 7 on MNIST and {maps['cifar10']} × 8 × 8 on CIFAR-10" in choices
        assert "a basis of generalized Sylvester flows that is the same for all images" in choices
        settings = FlowSettings(flows=1, hidden=16, context=3)
        assert build_posterior("sylvester", (4,), settings).params_per_sample == 2 * 4 + 3
        assert "gates of σ(2)" in choices
        _, logdet = build_posterior("iaf", (4,), settings).transform(torch.randn(5, 4), torch.zeros(5, 3))
        torch.testing.assert_close(logdet / 4, torch.sigmoid(torch.full((5,), 2.0)).log(), rtol=0, atol=0.02)

    def test_how_much_smaller_the_laptops_models_are(self):
        """As the page on results says."""
        for small, large in zip(self.first("laptop"), self.first("paper"), strict=True):
            counts = []
            for row, preset in ((small, "laptop"), (large, "paper")):
                config = row.config(preset)
                config = config.model_copy(update={"model": config.model.model_copy(update={"grey_levels": 2})})
                counts.append(count_parameters(build_model(config, SHAPES["mnist"])))
            smallest, largest = (23, 32.5) if "conv-" in small.model else (7, 9.5)
            assert smallest <= counts[1] / counts[0] <= largest

    def first(self, preset: str) -> list:
        return [row for row in VAE_TABLE.rows(preset) if row.images == "mnist" and row.seed == 0]

    def test_what_is_compared_with_what(self):
        assert references("mnist-iaf") == references("mnist-gaussian") == ["mnist-gaussian"]
        assert references("cifar10-conv-gaussian") == ["cifar10-conv-gaussian", "cifar10-gaussian"]
        assert references("mnist-sylvester") == ["mnist-gaussian", "mnist-iaf", "mnist-householder"]
        assert references("mnist-conv-sylvester") == ["mnist-conv-gaussian", "mnist-conv-iaf", "mnist-sylvester"]


def test_parameters_of_the_flow_count_the_head():
    """The original's four Householder flows with 256 features: 4,934,400, all of them in the head."""
    sizes = {"channels": 2, "growth": 2, "depth": 1}
    assert flow_parameters(image_vae((1, 8, 8), posterior="householder", grey_levels=2, **sizes)) == 4_934_400
    assert flow_parameters(image_vae((1, 8, 8), posterior="gaussian", grey_levels=2, **sizes)) == 0


@pytest.mark.usefixtures("tiny")
class TestReproduce:
    def test_rows_are_trained_measured_and_compared(self, tmp_path: Path):
        only = ("mnist-gaussian", "mnist-householder-0", "cifar10-conv-sylvester", "cifar10-conv-gaussian")
        outcome = reproduce(tmp_path, *(part for name in only for part in ("--only", name)))
        assert outcome.code == 0, outcome.err
        table = json.loads((tmp_path / "results" / "vae.json").read_text())
        assert [f"{r['model']}-{r['seed']}" for r in table["rows"]] == [
            "mnist-gaussian-0",
            "mnist-householder-0",
            "mnist-gaussian-1",
            "cifar10-conv-gaussian-0",
            "cifar10-conv-sylvester-0",
        ]
        first = table["rows"][0]
        assert (first["unit"], first["elbo_images"], first["nll_images"], first["steps"]) == ("nats", 12, 5, 4)
        assert table["rows"][-1]["unit"] == "bits per dimension"
        assert first["nll"] < first["elbo"]
        assert first["flow_parameters"] == 0
        assert first["latents"] == 3
        values = [np.load(tmp_path / f"results/vae/mnist-{name}-0.npy") for name in ("householder", "gaussian")]
        differences = {(d["model"], d["seed"]): d for d in table["differences"]}
        assert set(differences) == {("mnist-householder", 0), ("cifar10-conv-sylvester", 0)}
        expected = float((values[0] - values[1]).mean())
        assert differences["mnist-householder", 0]["elbo"] == pytest.approx(expected, abs=1e-5)
        text = (tmp_path / "results" / "vae.md").read_text()
        assert text == VAE_TABLE.text(table, "laptop")
        for words in ("85.54 ± 0.08", "3.48 ± 0.005", "2 seeds", "`expmflow reproduce vae --preset laptop --only"):
            assert words in text
        (_, half), (_, last) = first["curve"]
        assert (
            f"| posterior | seed | 2 | 4 |\n| --- | --- | --- | --- |\n| Gaussian | 0 | {half:.2f} | {last:.2f} |"
            in text
        )
        self.check_evaluate(tmp_path, first)

    def check_evaluate(self, folder: Path, row: dict) -> None:
        """The run gives the same numbers by the command for runs."""
        run = folder / "runs" / "vae" / "laptop" / "mnist-gaussian-0"
        assert json.loads(run_command("evaluate", run, "--json").out)["nll"] == pytest.approx(row["elbo"], abs=1e-4)
        weighed = run_command("evaluate", run, "--images", "5", "--importance-samples", "6", "--json")
        assert json.loads(weighed.out)["importance_weighted_nll"] == pytest.approx(row["nll"], abs=1e-4)

    def test_rows_that_vary_the_main_preset_are_compared_with_it(self, tmp_path: Path, tiny):
        """With themselves there, and with the rows before them, which are trained there alone."""
        laptop, wide = (VAE_TABLE.of_presets[name] for name in ("laptop", "wide-context"))
        rows = dict.fromkeys(("iaf", "sylvester"), (0,))
        setting = replace(laptop.settings["mnist"], rows=rows)
        setting = replace(setting, model={**setting.model, "context": 4})
        tiny.setitem(VAE_TABLE.of_presets, "wide-context", replace(wide, settings={"mnist": setting}))
        of_main = ("mnist-gaussian-0", "mnist-sylvester-0")
        assert reproduce(tmp_path, *(part for name in of_main for part in ("--only", name))).code == 0
        assert reproduce(tmp_path, "--preset", "wide-context").code == 0
        table = json.loads((tmp_path / "results" / "vae-wide-context.json").read_text())
        here, there = (tmp_path / "results" / folder for folder in ("vae-wide-context", "vae"))
        expected = {}
        for model, minus, folder in (
            ("mnist-iaf", f"mnist-gaussian{MAIN}", there),
            ("mnist-sylvester", "mnist-iaf", here),
            ("mnist-sylvester", f"mnist-sylvester{MAIN}", there),
            ("mnist-sylvester", f"mnist-gaussian{MAIN}", there),
        ):
            values = np.load(here / f"{model}-0.npy") - np.load(folder / f"{minus.removesuffix(MAIN)}-0.npy")
            expected[model, minus] = pytest.approx(float(values.mean()), abs=1e-5)
        assert {(d["model"], d["minus"]): d["elbo"] for d in table["differences"]} == expected
        text = (tmp_path / "results" / "vae-wide-context.md").read_text()
        assert "| Generalized Sylvester | Generalized Sylvester, preset laptop | 0 | – |" in text
        assert "| Generalized Sylvester | Gaussian, preset laptop | 0 | -2.25 |" in text

    def test_a_row_that_was_cut_goes_on_to_the_same_numbers(self, tmp_path: Path, tiny):
        class Cut(Exception):
            pass

        def cut(step: int) -> None:
            if step == 3:
                raise Cut

        (row,) = (row for row in VAE_TABLE.rows("laptop") if row.name == "mnist-iaf-0")
        with pytest.raises(Cut):
            VAE_TABLE.train(row, "laptop", tmp_path / "cut", threads=1, on_step=cut)
        found = []
        for place in ("cut", "whole"):
            VAE_TABLE.train(row, "laptop", tmp_path / place, threads=1, on_step=lambda step: None)
            found.append(VAE_TABLE.measure(row, "laptop", tmp_path / place, tmp_path / f"{place} values"))
        assert (found[0]["elbo"], found[0]["nll"]) == (found[1]["elbo"], found[1]["nll"])

    def test_a_row_that_is_done_is_not_run_again(self, tmp_path: Path):
        assert reproduce(tmp_path, "--only", "mnist-planar").code == 0
        again = reproduce(tmp_path, "--only", "mnist-planar")
        assert "done already" in again.err
        assert "mnist-planar-0: done" in reproduce(tmp_path, "--only", "mnist-planar", "--dry-run").out

    def test_steps_can_be_timed_again(self, tmp_path: Path, tiny):
        tiny.setattr("expmflow.experiments.experiment.TIMED_STEPS", 2)
        assert reproduce(tmp_path, "--only", "mnist-planar").code == 0
        assert reproduce(tmp_path, "--only", "mnist-planar", "--time").code == 0
        (row,) = json.loads((tmp_path / "results" / "vae.json").read_text())["rows"]
        assert row["timed_threads"] == 1
