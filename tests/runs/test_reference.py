"""Runs that travel: a folder alone evaluates, scores, samples and reports, as it did beside its data."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import expmflow as ef
from cli_runs import TINY, run_command
from expmflow.data.gaussian import gaussian_nll
from expmflow.runs.evaluation import open_run
from expmflow.runs.reference import PARTS, load_reference, measure
from expmflow.runs.typicality import Typicality
from kind_runs import IMAGES, train_kind
from report_page import Page

NAMES = ("height", "width")


def write_table(path: Path, rows: np.ndarray, order: tuple[int, ...] = (0, 1)) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([[NAMES[k] for k in order], *rows[:, order].tolist()])
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table and a run on it."""
    folder = tmp_path_factory.mktemp("table")
    rows = np.random.default_rng(0).normal(size=(300, 2)) * [1, 20]
    write_table(folder / "t.csv", rows)
    settings = ("train.steps=6", "data.test=0.2", "data.validation=0.2")
    settings = (f"data.path={folder / 't.csv'}", *TINY[1:], *settings)
    outcome = run_command("train", "table", *settings, "--out", folder / "run")
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos in two classes, and a conditional run on them."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for name, least in (("cats", 0), ("dogs", 100)):
        (folder / "photos" / name).mkdir(parents=True)
        for k in range(40):
            pixels = generator.integers(least, least + 100, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{k}.png")
    settings = IMAGES.replace("name: digits", f"name: images, path: {folder / 'photos'}")
    train_kind(folder / "run", settings, "model.conditional=true", "model.subflow=coupling", "train.sample_every=null")
    return folder


def carried(folder: Path, to: Path) -> Path:
    """The run alone, on a machine where nothing else is: its data is nowhere it was."""
    return Path(shutil.copytree(folder / "run", to / "run"))


class TestAlone:
    def test_a_table_is_evaluated_scored_sampled_and_reported(self, table: Path, here: Path, monkeypatch):
        new = write_table(here / "new.csv", np.array([[0.0, 1.0], [50.0, -900.0]]))
        asked = {"evaluate": ("evaluate", "RUN", "--json"), "score": ("score", "RUN", new), "sample": ("sample", "RUN")}

        def answers(run: Path) -> dict[str, str]:
            found = {what: run_command(*(run if a == "RUN" else a for a in words)) for what, words in asked.items()}
            assert all(outcome.code == 0 for outcome in found.values()), found
            return {what: outcome.out.replace(str(run), "RUN") for what, outcome in found.items()}

        before = answers(table / "run")
        run = carried(table, here)
        shutil.move(table / "t.csv", table / "hidden.csv")
        try:
            after = answers(run)
            assert after == before
            assert "these are the values that the run stores" in run_command("evaluate", run).err
            assert run_command("report", run).code == 0
            page = Page((run / "report.html").read_text())
        finally:
            shutil.move(table / "hidden.csv", table / "t.csv")
        assert dict(page.tables["results"][1:])["rows: training, validation, test"] == "180, 60, 60"
        assert len(page.images) >= 2
        flagged = [row["flagged"] for row in csv.DictReader(after["score"].splitlines())]
        assert flagged == ["0", "1"]

    def test_what_save_pretrained_wrote_scores_too(self, table: Path, here: Path):
        ef.save_pretrained(table / "run", here / "copy")
        new = write_table(here / "new.csv", np.array([[0.0, 1.0], [50.0, -900.0]]))
        shutil.move(table / "t.csv", table / "hidden.csv")
        try:
            assert run_command("score", "copy", new).out == run_command("score", table / "run", new).out
            assert run_command("report", "copy").code == 0
        finally:
            shutil.move(table / "hidden.csv", table / "t.csv")

    def test_photos_keep_their_classes_and_their_form(self, photos: Path, here: Path):
        run = carried(photos, here)
        shutil.move(photos / "photos", photos / "hidden")
        try:
            trained = open_run(run)
            assert trained.class_names == ("cats", "dogs")
            scored = run_command("score", run, photos / "hidden" / "dogs")
            assert scored.code == 0, scored.err
            assert len(scored.out.splitlines()) == 41
            assert json.loads(run_command("evaluate", run, "--json").out)["rows"] == 8
            assert run_command("sample", run, "-n", "4", "--classes", "dogs,cats", "--out", "named.npy").code == 0
            assert run_command("sample", run, "-n", "4", "--classes", "1,0", "--out", "numbered.npy").code == 0
            assert (np.load("named.npy") == np.load("numbered.npy")).all()
            assert "names (cats, dogs)" in run_command("sample", run, "--classes", "cows").err
            assert run_command("report", run).code == 0
            refused = run_command("evaluate", run, "--importance-samples", "2")
        finally:
            shutil.move(photos / "hidden", photos / "photos")
        assert refused.code == 1
        assert refused.err.startswith("Expected a folder of images, a .npy or a .npz file; got ")
        known = load_reference(open_run(run))
        assert known.labels.tolist()[:4] == [0, 1, 0, 1]  # a column for each class

    def test_without_what_is_kept_the_missing_data_is_named(self, table: Path, here: Path):
        run = carried(table, here)
        (run / "reference.safetensors").unlink()
        moved = shutil.move(table / "t.csv", here / "t.csv")
        try:
            for command in (("evaluate", run), ("report", run)):
                outcome = run_command(*command)
                assert outcome.code == 1
                assert outcome.err == f"Expected the file {table / 't.csv'}; got none."
        finally:
            shutil.move(moved, table / "t.csv")


class TestReference:
    def test_it_is_what_the_run_says_of_its_data(self, table: Path):
        trained = open_run(table / "run")
        known, data = load_reference(trained), trained.data()
        parts = dict(zip(PARTS, (data.train, data.validation, data.test), strict=True))
        for part, rows in parts.items():
            assert known.counts[part] == len(rows)
            torch.testing.assert_close(known.nll[part], -trained.log_likelihoods(rows))
        assert torch.equal(known.scored, known.nll["validation"])
        assert torch.equal(known.rows, data.train)
        baseline = known.baselines["a Gaussian of full covariance"]
        assert baseline == pytest.approx(gaussian_nll(data.train, data.test))

    def test_other_weights_have_another(self, table: Path, here: Path):
        run = carried(table, here)
        assert load_reference(open_run(run)) is not None
        model = ef.load(run)
        with torch.no_grad():
            next(model.parameters()).add_(0.1)
        trained = open_run(run)
        trained.folder.save_weights(model.state_dict())
        assert load_reference(open_run(run)) is None
        assert run_command("train", "--resume", run, "train.steps=9").code == 0
        assert load_reference(open_run(run)) is not None

    @pytest.mark.parametrize("damage", [b"", b"\x00" * 100, None])
    def test_damage_is_one_sentence(self, table: Path, here: Path, damage: bytes | None):
        run = carried(table, here)
        path = run / "reference.safetensors"
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content if damage is None else damage)
        outcome = run_command("report", run)
        assert outcome.code == 1
        assert outcome.err.startswith("Expected ")
        assert "Traceback" not in outcome.err

    def test_a_conditional_model_is_measured_with_classes_and_scored_without(self, photos: Path):
        trained = open_run(photos / "run")
        known, data = load_reference(trained), trained.data()
        told = -trained.log_likelihoods(data.validation, labels=data.labels[1])
        torch.testing.assert_close(known.nll["validation"], told)
        torch.testing.assert_close(known.scored, -trained.log_likelihoods(data.validation))
        likely, unlikely = (trained.log_likelihoods(rows).mean() for rows in known.extremes)
        assert likely > unlikely

    def test_a_run_of_the_library_is_measured_when_it_is_asked(self, table: Path, here: Path):
        run = carried(table, here)
        (run / "reference.safetensors").unlink()
        with_data = run_command("score", run, table / "t.csv")
        assert with_data.code == 0
        assert with_data.out == run_command("score", table / "run", table / "t.csv").out


class TestOtherData:
    def test_moved_data_is_recognised(self, table: Path, here: Path):
        shutil.copy(table / "t.csv", here / "elsewhere.csv")
        expected = json.loads(run_command("evaluate", table / "run", "--json").out)
        found = json.loads(run_command("evaluate", table / "run", "--json", "--data", "elsewhere.csv").out)
        assert found == expected
        assert found["split"] == "test"
        validated = json.loads(
            run_command("evaluate", table / "run", "--json", "--data", "elsewhere.csv", "--split", "validation").out
        )
        assert validated["rows"] == 60

    def test_other_rows_are_all_evaluated_by_their_names(self, table: Path, here: Path):
        rows = np.random.default_rng(1).normal(size=(7, 2)) * [1, 20]
        write_table(here / "other.csv", rows, order=(1, 0))
        found = json.loads(run_command("evaluate", table / "run", "--json", "--data", "other.csv").out)
        assert (found["rows"], found["split"]) == (7, "other")
        expected = -ef.load(table / "run").log_prob(torch.from_numpy(rows).float()).mean()
        assert found["nll"] == pytest.approx(float(expected.detach()), rel=1e-5)
        assert run_command("report", table / "run", "--data", "other.csv", "--out", "r.html").code == 0
        assert "0, 0, 7" in (here / "r.html").read_text()

    def test_scores_may_be_measured_by_them(self, table: Path, here: Path):
        rows = np.random.default_rng(1).normal(size=(200, 2)) * [1, 20]
        write_table(here / "normal.csv", rows)
        outcome = run_command("score", table / "run", "normal.csv", "--data", "normal.csv", "--quantile", "0.9")
        flagged = sum(int(row["flagged"]) for row in csv.DictReader(outcome.out.splitlines()))
        assert flagged == 19

    def test_what_is_drawn_is_nowhere_else(self, here: Path):
        assert run_command("train", "moons", *TINY, "--out", "run").code == 0
        outcome = run_command("evaluate", "run", "--data", "elsewhere.csv")
        assert outcome.err == "Expected a run on files for --data; got run, on moons."


def test_held_out_rows_are_flagged_at_the_nominal_rate():
    """Whatever the density of the scores: of n rows and one more, the last is beyond with probability 1 − quantile."""
    generator = torch.Generator().manual_seed(0)
    for n, quantile in ((50, 0.9), (200, 0.95), (99, 0.99)):
        rates = []
        for _ in range(300):
            nll = torch.randn(n + 200, generator=generator).exp()  # skewed, as likelihoods are
            typical = Typicality.of(nll[:n], quantile=quantile)
            rates.append((typical.score(nll[n:]) > typical.threshold).double().mean())
        found = torch.stack(rates)
        assert float(found.mean()) == pytest.approx(1 - quantile, abs=4 * float(found.std()) / math.sqrt(300))


class TestGaussian:
    def test_it_is_torch_s(self):
        generator = torch.Generator().manual_seed(0)
        mixing = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        train, rows = (torch.randn(n, 3, generator=generator, dtype=torch.float64) @ mixing + 5 for n in (200, 50))
        known = torch.distributions.MultivariateNormal(train.mean(0), train.T.cov(correction=0))
        assert gaussian_nll(train, rows) == pytest.approx(-float(known.log_prob(rows).mean()), rel=1e-9)

    def test_it_does_not_depend_on_units_beyond_their_logarithm(self):
        rows = torch.randn(100, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        scaled = gaussian_nll(rows * 1e6, rows * 1e6) - 2 * math.log(1e6)
        assert scaled == pytest.approx(gaussian_nll(rows, rows), rel=1e-9)

    @pytest.mark.parametrize("second", ["constant", "same"])
    def test_columns_that_say_nothing_new_are_no_infinity(self, second: str):
        first = torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
        rows = torch.cat([first, torch.ones_like(first) if second == "constant" else first], dim=1)
        assert math.isfinite(gaussian_nll(rows, rows))


def test_a_table_run_says_what_a_gaussian_has(table: Path, here: Path):
    outcome = run_command("train", "--resume", carried(table, here), f"data.path={table / 't.csv'}")
    assert "that of a Gaussian of full covariance is " in outcome.err
    assert "The model does not beat it" in outcome.err  # after six steps
    run_command("report", table / "run", "--out", "r.html")
    results = dict(Page((here / "r.html").read_text()).tables["results"][1:])
    assert results["nll of a Gaussian of full covariance (nats)"].endswith("which the model does not beat")


def test_every_part_is_measured_once(table: Path):
    trained = open_run(table / "run")
    told: list[int] = []
    measure(trained, trained.data(), told.append)
    assert sum(told) == 300
