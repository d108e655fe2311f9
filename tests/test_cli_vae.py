"""VAEs through the command line: every command, and a linear one whose evidence is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import expmflow as ef
from cli_runs import run_command
from expmflow.data import Dataset, binarized
from expmflow.report.summary import summarise
from expmflow.runs.evaluation import open_run
from expmflow.training.weights import read_metadata, read_tensors, save_weights
from kind_runs import STEPS, train_kind
from report_page import Page, png_size

IMAGES = (
    "{data: {name: digits}, model: {kind: vae, posterior: conv-sylvester, latents: 2, flows: 1, hidden: 4, context: 2, "
    "channels: 2, growth: 2, depth: 1, components: 2}, optim: {lr: 0.01, kl_warmup: 2}, " + STEPS + "}"
)
TABLE = (
    "{data: {name: table, test: 0.3}, model: {kind: vector-vae, posterior: gaussian, latents: 1, layers: 0}, "
    "optim: {lr: 0.02}, train: {steps: 300, batch_size: 100, log_every: 50, validate_every: 100, precision: float64}}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_kind(tmp_path_factory.mktemp("vae") / "images", IMAGES)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on rows of a Gaussian with one direction that stands out."""
    folder = tmp_path_factory.mktemp("linear")
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(1000, 1)) * [1.0, -0.5, 2.0] + 0.5 * generator.normal(size=(1000, 3)) + [1, 2, 3]
    np.save(folder / "rows.npy", rows)
    return train_kind(folder / "run", TABLE, f"data.path={folder / 'rows.npy'}"), folder


def result(*arguments: str | Path) -> dict:
    outcome = run_command(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_a_linear_vae_is_estimated_as_its_evidence(table: tuple[Path, Path]):
    """x = W z + c + σ e has a density in closed form; the bound lies below it, importance samples come up to it."""
    folder, _ = table
    vae = ef.load(folder)
    w, std = vae.decoder[0].weight, vae.likelihood.log_std.exp()
    density = torch.distributions.MultivariateNormal(vae.decoder[0].bias, w @ w.T + torch.diag(std**2))
    test = open_run(folder).data().test.double()
    evidence = -float(density.log_prob(test).mean().detach())
    bound = result("evaluate", folder)
    weighed = result("evaluate", folder, "--importance-samples", "500")
    assert bound["nll"] >= evidence - 0.02
    assert abs(weighed["importance_weighted_nll"] - evidence) < 0.02
    assert evidence < 5.0  # it has learned: independent normals have 5.3


def test_every_command(run: Path, here: Path):
    assert run_command("evaluate", run).code == 0
    weighed = result("evaluate", run, "--importance-samples", "8", "--images", "10")
    assert np.isfinite(weighed["importance_weighted_bpd"])
    assert run_command("sample", run, "-n", "5", "--out", here / "x.npy").code == 0
    assert np.load(here / "x.npy").shape == (5, 1, 8, 8)
    assert run_command("sample", run, "-n", "4", "--out", here / "x.png").code == 0
    scored = run_command("score", run, here / "x.npy")
    assert scored.code == 0, scored.err
    assert run_command("report", run).code == 0
    page = (run / "report.html").read_text()
    for text in ("latents in use", "their reconstructions", "on the way between the first two test images", "−ELBO"):
        assert text in page
    for arguments in (("train", "vae-mnist"), ("evaluate", run), ("sample", run), ("report", run)):
        outcome = run_command(*arguments, "--dry-run", *(["data.name=digits"] if arguments[0] == "train" else []))
        assert outcome.code == 0, outcome.err


def test_a_report_shows_what_latents_make_of_test_images(run: Path, here: Path):
    trained = open_run(run)
    summary, test = summarise(trained), trained.data().test
    assert summary.latents_of == "test"
    assert torch.equal(summary.latents.rows, test[:64])
    expected = trained.model.latents(test[:64])
    torch.testing.assert_close(summary.latents.reconstructions, expected.reconstructions)
    assert run_command("report", run, "--out", here / "report.html").code == 0
    page = Page((here / "report.html").read_text(encoding="utf-8"))
    side = 64 + 2
    sizes = [png_size(image) for image in page.images]
    assert sizes[5] == (12 * side + 2, 10 * side + 2)  # five times twelve test images, and what is expected of them
    assert sizes[6] == (9 * side + 2, side + 2)
    assert len(sizes) == 9  # and curves, data, samples, most and least likely, the KL of latents, scores
    kl = [f"{value:.2f}" for value in expected.kl.sort(descending=True).values[:10].tolist()]
    results = dict(page.tables["results"][1:])
    assert results["KL of latents, largest first (nats)"].startswith(", ".join(kl[: len(expected.kl)]))
    assert results["latents in use (KL above 0.01 nats)"] == f"{int((expected.kl > 0.01).sum())} of {len(expected.kl)}"


def test_of_a_vae_without_exponentials_none_are_reported(table: tuple[Path, Path], here: Path):
    assert run_command("report", table[0], "--out", here / "report.html").code == 0
    text = (here / "report.html").read_text(encoding="utf-8")
    for words in ("Exponential layers", "truncation error", "round-trip error"):
        assert words not in text
    assert "latents in use" in text


def test_what_an_earlier_version_kept_is_called_training_images(run: Path, here: Path):
    copy = shutil.copytree(run, here / "run")
    path = copy / "reference.safetensors"
    tensors, metadata = read_tensors(path), read_metadata(path)
    save_weights(path, {name: t for name, t in tensors.items() if name != "examples"}, metadata)
    assert run_command("report", copy).code == 0
    assert "training images, and below them their reconstructions" in (copy / "report.html").read_text()


def test_importance_samples_go_on_where_they_were_cut(run: Path, here: Path):
    copy, settings = shutil.copytree(run, here / "run"), ("--importance-samples", "70", "--images")
    result("evaluate", copy, *settings, "2")
    (kept,) = (copy / "evaluation").glob("test-70-*")
    kept.write_text(kept.read_text()[:-9])  # killed in the middle of a line
    resumed = result("evaluate", copy, *settings, "3")
    kept.unlink()
    assert result("evaluate", copy, *settings, "3") == resumed


@pytest.mark.parametrize("name", ["binarized-mnist", "dynamic-mnist"])
def test_black_and_white_images_are_measured_in_nats(name: str, here: Path, monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(256, (n, 1, 8, 8), generator=generator, dtype=torch.uint8) for n in (40, 8, 12)]
    grey = Dataset(*parts, levels=256, kind="images")
    monkeypatch.delenv("EXPMFLOW_DATA", raising=False)
    monkeypatch.setattr(binarized, "load_mnist", lambda name, folder, progress: grey)
    run = train_kind(here / "run", IMAGES, f"data.name={name}")
    assert ef.load(run).levels == 2
    found = result("evaluate", run)
    assert 20 < found["nll"] < 80  # 64 pixels: 44 nats if each were black or white alike
    assert "bpd" not in found
    np.save(here / "x.npy", open_run(run).data().test[:3].numpy())
    scores = result("score", run, here / "x.npy")["rows"]
    assert [list(row) for row in scores] == [["name", "nll", "typicality", "flagged"]] * 3
    expected = -open_run(run).log_likelihoods(open_run(run).data().test[:3])
    assert [row["nll"] for row in scores] == pytest.approx(expected.tolist())
    assert run_command("report", run).code == 0
    page = (run / "report.html").read_text()
    assert "test −ELBO (nats)" in page
    for text in ("bits per dimension", "round-trip error"):
        assert text not in page


def test_a_vae_is_loaded(run: Path):
    vae = ef.load(run)
    assert isinstance(vae, ef.models.VAE)
    assert vae.sample(2).shape == (2, 1, 8, 8)
    assert "ConvSylvester" in vae.description()


def test_a_vae_that_diverges_stops_in_a_sentence(here: Path):
    config = here / "vae.yaml"
    config.write_text(IMAGES)
    wild = ("optim.lr=1e30", "optim.kl_warmup=0", "train.steps=5")
    outcome = run_command("train", config, *wild, "--out", here / "run")
    assert outcome.code != 0
    assert "NaN or infinity in" in outcome.err


def test_a_warm_up_is_of_the_kl(run: Path, here: Path):
    outcome = run_command("train", "moons", "optim.kl_warmup=5", "--out", here / "moons")
    assert outcome.code != 0
    assert "which has no KL part" in outcome.err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.posterior=normal",), "model.posterior: input should be 'gaussian', 'planar'"),
        (("data.name=moons",), "or vector-vae for the data moons; got model.kind=vae."),
        (("model.grey_levels=3",), "Expected model.grey_levels=17, as the data has; got 3."),
        (("model.likelihood=bernoulli",), "Expected two grey levels for bernoulli; got 17."),
    ],
)
def test_mistakes_are_one_sentence(overrides: tuple[str, ...], message: str, here: Path):
    config = here / "vae.yaml"
    config.write_text(IMAGES)
    outcome = run_command("train", config, *overrides, "--out", here / "run")
    assert outcome.code != 0
    assert message in outcome.err
