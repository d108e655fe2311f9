"""Every command, end to end, on images."""

import csv
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import expmflow as ef
from cli_runs import files, run_command
from expmflow.data import load_images
from expmflow.data.drawing.grids import GAP, class_columns, image_grid
from expmflow.runs import evaluation, shipped
from expmflow.runs.evaluation import open_run
from expmflow.runs.importance import importance_estimates
from expmflow.runs.typicality import auroc
from expmflow.training.run import RunFolder
from kind_runs import IMAGES, train_kind

LEVELS, FACTOR = 17, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_kind(tmp_path_factory.mktemp("images") / "run", IMAGES)


@pytest.fixture(scope="module")
def conditional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes") / "run"
    return train_kind(folder, IMAGES, "model.conditional=true", "model.subflow=coupling")


def tiles(path: Path, lines: int, columns: int) -> np.ndarray:
    """The images of a grid, `(n, h, w)`, at their own size."""
    page = np.asarray(Image.open(path)).astype(int)
    side = 8 * FACTOR
    assert page.shape == (lines * (side + GAP) + GAP, columns * (side + GAP) + GAP)
    found = []
    for k in range(lines * columns):
        top, left = GAP + k // columns * (side + GAP), GAP + k % columns * (side + GAP)
        tile = page[top : top + side, left : left + side]
        small = tile[::FACTOR, ::FACTOR]
        assert (small.repeat(FACTOR, 0).repeat(FACTOR, 1) == tile).all()
        found.append(small)
    return np.stack(found)


# --- train -----------------------------------------------------------------------------------------------------------


def test_training_leaves_grids_of_samples(run: Path):
    for path in (run / "samples.png", run / "samples" / "step-00000003.png"):
        assert tiles(path, 8, 8).max() <= 255


def test_paths_are_whole_in_the_config(here: Path, monkeypatch: pytest.MonkeyPatch):
    np.save("photos.npy", np.random.default_rng(0).integers(0, 256, (60, 4, 4), dtype=np.uint8))
    settings = IMAGES.replace("name: digits", "name: images, path: photos.npy, dir: files")
    train_kind(here / "run", settings, "train.sample_every=null")
    data = RunFolder(here / "run").read_config()[0].data
    assert (data.path, data.dir) == (here / "photos.npy", here / "files")
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    assert json.loads(run_command("evaluate", "../run", "--json").out)["rows"] == 6


def test_a_run_goes_on_where_the_official_files_have_moved(here: Path):
    train_kind(here / "run", IMAGES, "train.sample_every=null")
    outcome = run_command("train", "run.yaml", "data.dir=elsewhere", "train.sample_every=null", "--out", "run")
    assert outcome.code == 0, outcome.err


# --- sample ----------------------------------------------------------------------------------------------------------


def test_a_picture_without_being_asked(run: Path, here: Path):
    outcome = run_command("sample", run, "-n", "6")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "6 samples in samples.png")
    assert files(here) == {"samples.png"}


def test_pixels_of_the_grid_are_the_samples(run: Path, here: Path):
    for name in ("s.npy", "s.png"):
        assert run_command("sample", run, "-n", "6", "--out", name).code == 0
    drawn = np.load("s.npy")
    assert (drawn.dtype, drawn.shape) == (np.uint8, (6, 1, 8, 8))
    assert (tiles(here / "s.png", 2, 3) == np.rint(drawn[:, 0] / (LEVELS - 1) * 255)).all()


def test_classes_in_turn_one_column_each(conditional: Path, here: Path):
    assert run_command("sample", conditional, "-n", "4", "--classes", "3,7", "--out", "s.npy").code == 0
    expected = open_run(conditional).sample(4, labels=torch.tensor([3, 7, 3, 7]))
    assert (np.load("s.npy") == expected.numpy()).all()
    assert run_command("sample", conditional, "-n", "20").code == 0
    tiles(here / "samples.png", 2, 10)


def test_grids_of_colours_and_of_large_images():
    images = torch.randint(256, (5, 3, 70, 50), generator=torch.Generator().manual_seed(0))
    page = np.asarray(image_grid(images, 256, columns=4))
    assert page.shape == (2 * (70 + GAP) + GAP, 4 * (50 + GAP) + GAP, 3)
    assert (page[GAP : GAP + 70, GAP : GAP + 50] == images[0].permute(1, 2, 0).numpy()).all()
    assert (page[-40:, -40:] == 255).all()  # the grid's last places are empty
    assert [class_columns(*case) for case in ((10, 30), (10, 5), (None, 5), (1, 5))] == [10, None, None, None]


# --- evaluate --------------------------------------------------------------------------------------------------------


def test_one_noise_is_a_bound_and_is_called_one(run: Path):
    outcome = run_command("evaluate", run, "--images", "20")
    assert "−ELBO, bits per dimension" in outcome.out
    assert "20 test rows" in " ".join(outcome.out.split())  # a long title is wrapped
    found = json.loads(run_command("evaluate", run, "--rows", "20", "--json").out)
    assert (found["rows"], found["bound"]) == (20, "elbo")
    assert found["bpd"] == pytest.approx(found["nll"] / (64 * math.log(2)))
    assert not (run / "evaluation").exists()


def test_the_bound_of_an_image_depends_on_neither_batches_nor_other_images(run: Path, monkeypatch: pytest.MonkeyPatch):
    trained = open_run(run)
    rows = trained.data().test[:12]
    together = trained.log_likelihoods(rows)
    assert together.std() > 1  # nats, where another noise would make a difference
    monkeypatch.setattr(evaluation, "LARGEST_BATCH", 5)
    torch.testing.assert_close(trained.log_likelihoods(rows), together, rtol=1e-5, atol=0)
    torch.testing.assert_close(trained.log_likelihoods(rows.flip(0)[:7].int()), together.flip(0)[:7], rtol=1e-5, atol=0)


def test_importance_samples_are_kept_and_tighter(run: Path, tmp_path: Path):
    copy = shutil.copytree(run, tmp_path / "run")
    settings = ("--importance-samples", "8", "--json", "--images")
    first = run_command("evaluate", copy, *settings, "2")
    found = json.loads(first.out)
    (kept,) = (copy / "evaluation").iterdir()
    assert first.err == f"Results are kept in {kept}"
    assert found["kept_in"] == str(kept)
    assert found["importance_weighted_bpd"] <= found["bpd"]
    assert {"bpd_standard_error", "importance_weighted_bpd_standard_error"} <= found.keys()
    content = kept.read_text()
    kept.write_text(content[:-5])  # killed in the middle of a line
    again = run_command("evaluate", copy, *settings, "4")
    assert again.err == f"Going on with {kept}"
    assert kept.read_text().startswith(content[:-5])
    shutil.rmtree(copy / "evaluation")
    assert json.loads(run_command("evaluate", copy, *settings, "4").out) == json.loads(again.out)


def test_kept_estimates_are_those_of_their_rows(run: Path, tmp_path: Path):
    trained = open_run(run)
    first, other = trained.data().test[:4].split(2)
    kept = tmp_path / "kept.jsonl"
    before = importance_estimates(trained, first, 3, kept_in=kept)
    changed = importance_estimates(trained, torch.stack([first[0], other[1]]), 3, kept_in=kept)
    assert changed.log_prob[0] == before.log_prob[0]
    fresh = importance_estimates(trained, torch.stack([first[0], other[1]]), 3)
    assert torch.equal(changed.log_prob, fresh.log_prob)
    assert changed.log_prob[1] != before.log_prob[1]


def test_conditional_models_are_told_the_classes(conditional: Path):
    found = json.loads(run_command("evaluate", conditional, "--images", "5", "--json").out)
    trained = open_run(conditional)
    data = trained.data()
    expected = trained.log_likelihoods(data.test[:5], labels=data.labels[2][:5])
    assert found["nll"] == pytest.approx(-float(expected.mean()))
    assert run_command("evaluate", conditional, "--images", "1", "--importance-samples", "3").code == 0


def test_scores_without_classes_are_those_of_the_mixture_of_all(conditional: Path, here: Path):
    trained = open_run(conditional)
    images, labels = trained.data().test[:4], trained.data().labels[2][:4]
    each = torch.stack([trained.log_likelihoods(images, labels=torch.full((4,), c)) for c in range(10)])
    whole = trained.log_likelihoods(images)
    torch.testing.assert_close(whole, each.exp().mean(0).log())
    assert bool((whole >= trained.log_likelihoods(images, labels=labels) - math.log(10)).all())
    assert bool((whole <= each.amax(0)).all())
    np.save("x.npy", images.numpy())
    scores = csv.DictReader(run_command("score", conditional, "x.npy").out.splitlines())
    bpd = -whole / (64 * math.log(2))
    np.testing.assert_allclose([float(row["bpd"]) for row in scores], bpd.numpy(), rtol=1e-6)


# --- score -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(here: Path) -> Path:
    """Three digits that were held out, in a folder of their own, and two pictures of another kind beside it."""
    held_out = load_images("digits", generator=torch.Generator()).test[:, 0].numpy()
    (here / "digits").mkdir()
    for k in range(3):
        Image.fromarray(held_out[k]).save(here / "digits" / f"{k}.png")
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(here / "blank.png")
    photo = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(photo).save(here / "photo.jpg")
    np.savez(here / "more.npz", images=held_out[3:5])
    return here


def test_scores_of_files_folders_and_arrays(run: Path, pictures: Path):
    outcome = run_command("score", run, "digits", "blank.png", "more.npz", "--out", "scores.csv")
    assert outcome.code == 0, outcome.err
    assert "of 6 rows flagged" in outcome.err
    rows = list(csv.DictReader(io.StringIO((pictures / "scores.csv").read_text())))
    assert [row["name"] for row in rows] == [*(f"digits/{k}.png" for k in range(3)), "blank.png"] + [
        f"more.npz[{k}]" for k in range(2)
    ]
    assert list(rows[0]) == ["name", "bpd", "typicality", "flagged"]
    assert 2 < float(rows[0]["bpd"]) < 6
    found = json.loads(run_command("score", run, "digits", "blank.png", "more.npz", "--json").out)
    assert [str(row["bpd"]) for row in found["rows"]] == [row["bpd"] for row in rows]


def test_a_reference_gives_an_auroc(run: Path, pictures: Path):
    outcome = run_command("score", run, "blank.png", "--reference", "digits", "--reference", "more.npz", "--json")
    found = json.loads(outcome.out)
    assert set(found["auroc"]) == {"typicality", "bpd"}
    assert all(0 <= value <= 1 for value in found["auroc"].values())
    assert "AUROC against 5 reference rows" in outcome.err


def test_auroc_is_the_share_of_pairs_in_order():
    scores, reference = torch.randint(9, (2, 50), generator=torch.Generator().manual_seed(0)).double()
    pairs = scores[:, None] - reference
    assert auroc(scores, reference) == pytest.approx(
        float((pairs > 0).double().mean() + (pairs == 0).double().mean() / 2)
    )


def test_a_photograph_is_made_to_fit(run: Path, pictures: Path):
    refused = run_command("score", run, "photo.jpg")
    assert refused.code == 1
    assert refused.err.startswith("Expected ")
    assert run_command("score", run, "photo.jpg", "--fit").code == 0


def test_a_tighter_bound_for_scores(run: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("expmflow.cli.score.WEIGHTED_ROWS", 3)
    settings = ("--importance-samples", "4", "--json")
    tight = json.loads(run_command("score", run, "blank.png", *settings).out)["rows"][0]
    trained = open_run(run)
    exact = trained.model.importance_weighted(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), samples=200)
    assert tight["bpd"] == pytest.approx(-float(exact) / (64 * math.log(2)), rel=0.02)


# --- data ------------------------------------------------------------------------------------------------------------


def test_image_sets_are_described(pictures: Path):
    text = " ".join(run_command("data", "digits").out.split())
    assert "1797 images" in text
    assert "(1, 8, 8), grey" in text
    assert "1290 training, 255 validation, 252 test" in text
    assert "0: 178, 1: 182" in text
    assert "5 images" not in text
    assert "3 images" in run_command("data", "digits/").out  # the folder, not the name
    assert "2 images" in run_command("data", "more.npz").out
    (pictures / "digits" / "9.png").write_bytes(b"no image")
    described = run_command("data", "digits/")
    assert "3 images" in described.out
    assert "Of 4 files, left out 1 file that is broken: Expected an image in digits/9.png" in described.err
    np.save("table.npy", np.zeros((4, 2)))
    assert "4 rows, 2 columns" in run_command("data", "table.npy").out


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sample", "RUN", "--out", "x.csv"), "Expected a .png or .npy file for samples of"),
        (("sample", "RUN", "--classes", "3"), "Expected a conditional model for --classes; got"),
        (("sample", "CONDITIONAL", "--classes", "3,10"), "Expected --classes from 0 to 9, with commas"),
        (("sample", "CONDITIONAL", "--classes", "three"), "Expected --classes from 0 to 9, with commas"),
        (("evaluate", "RUN", "--images", "0"), "Expected --images of at least 1; got 0."),
        (("evaluate", "RUN", "--importance-samples", "0"), "Expected importance samples of at least 1; got 0."),
        (("score", "RUN", "missing.png"), "got missing.png, which does not exist."),
        (("score", "RUN", "x.png", "--out", "x.txt"), "Expected a .csv or .json file for the scores; got x.txt."),
        (("score", "CONDITIONAL", "x.png", "--importance-samples", "2"), "Expected a model without classes"),
        (("data", "digit"), "(did you mean 'digits'?)"),
        (("data", "missing.npz"), "missing.npz"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, conditional: Path, here: Path, arguments: tuple[str, ...], message: str):
    known = {"RUN": str(run), "CONDITIONAL": str(conditional)}
    outcome = run_command(*(known.get(a, a) for a in arguments))
    assert outcome.code == 1
    assert message in outcome.err
    assert files(here) == set()


def test_everything_can_be_tried_first(run: Path, here: Path):
    before = files(run)
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(here / "blank.png")
    for arguments in (
        ("sample", run),
        ("evaluate", run, "--images", "4", "--importance-samples", "8"),
        ("score", run, "blank.png"),
        ("data", "digits"),
    ):
        outcome = run_command(*arguments, "--dry-run")
        assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "nothing was written"), outcome.err
    assert files(run) == before
    assert files(here) == {"blank.png"}


# --- models that come with the package -------------------------------------------------------------------------------


@pytest.fixture
def named(run: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path_factory.mktemp("shipped")
    monkeypatch.setattr(shipped, "FOLDER", folder)
    ef.save_pretrained(run, folder / "tiny")
    return "tiny"


def test_a_shipped_model_goes_by_its_name(named: str, run: Path, here: Path):
    assert run_command("sample", named, "-n", "4").code == 0
    assert json.loads(run_command("evaluate", named, "--images", "3", "--json").out)["run"] == named
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(here / "blank.png")
    assert run_command("score", named, "blank.png").code == 0
    assert run_command("evaluate", named, "--images", "1", "--importance-samples", "2").code == 0
    inside = {f"tiny/{name}" for name in ("config.json", "model.safetensors", "reference.safetensors")}
    assert files(shipped.FOLDER) == inside  # nothing is written into the package
    assert {path.split("/")[0] for path in files(here)} == {"blank.png", "samples.png", "runs"}
    for name, tensor in ef.load(named).state_dict().items():
        assert torch.equal(tensor, ef.load(run).state_dict()[name])


def test_a_folder_goes_before_a_shipped_model(named: str, conditional: Path, here: Path):
    ef.save_pretrained(conditional, here / named)
    assert open_run(named).classes == 10


def test_an_unknown_name_is_told_the_known_ones(named: str, here: Path):
    outcome = run_command("sample", "tinny")
    assert outcome.code == 1
    assert outcome.err == "Expected a run in tinny; got no such folder. Models that come with expmflow: tiny."
