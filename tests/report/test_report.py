"""The report: its pictures, its tables, and that it needs nothing else."""

import dataclasses
import math
import platform
import re
import shutil
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

import expmflow as ef
from cli_runs import TINY, run_command, train_tiny
from expmflow.data.drawing.columns import columns_figure
from expmflow.data.drawing.panels import save_figure
from expmflow.distributions.describe import count_parameters
from expmflow.report.certificates import certificates
from expmflow.report.figures import curves_figure, scores_figure
from expmflow.report.summary import density, round_trip, summarise
from expmflow.runs.evaluation import Trained, open_run
from report_page import CHROMIUM, Page, png_size, shown_widths


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table of five columns."""
    folder = tmp_path_factory.mktemp("wide")
    np.save(folder / "t.npy", np.random.default_rng(0).normal(size=(200, 5)))
    settings = (*TINY[1:], "data.name=table", f"data.path={folder / 't.npy'}")
    assert run_command("train", "moons", *settings, "--out", folder / "run").code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def trained(run: Path) -> Trained:
    return open_run(run)


def test_one_run_has_its_pictures_and_tables(run: Path):
    outcome = run_command("report", run)
    assert outcome.code == 0
    assert outcome.err == f"report in {run / 'report.html'}"
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    assert len(page.images) == 3
    assert all(min(png_size(image)) > 300 for image in page.images)
    assert all(link.startswith("data:") for link in page.links)  # nothing is fetched
    results = {row[0]: row[1] for row in page.tables["results"][1:]}
    assert results["parameters"].replace(",", "") == str(count_parameters(ef.load(run)))
    assert float(results["round-trip error, relative"]) < 1e-4
    assert float(results["largest truncation error, proven"]) <= 1e-6
    assert len(page.tables["certificates"]) == 1 + 1  # a head, and one exponential in one block
    assert ["train.steps", "6"] in page.tables["config"]
    assert {row[0] for row in page.tables["timings"][1:]} >= {"training, per step", "sample, per row"}


def test_best_validation_is_the_least_on_record(run: Path, trained: Trained):
    page = Page(run_report(run))
    best = min(r["validation_nll"] for r in trained.folder.read_metrics() if "validation_nll" in r)
    assert ["best validation nll (nats)", f"{best:.4f}"] in page.tables["results"]


def run_report(*runs: Path) -> str:
    target = runs[0].parent / "compared.html"
    assert run_command("report", *runs, "--out", target).code == 0
    return target.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compared(run: Path, wide: Path) -> str:
    return run_report(run, wide)


def test_several_runs_stand_side_by_side(run: Path, wide: Path, compared: str):
    page = Page(compared)
    assert len(page.images) == 5
    for table in ("results", "timings", "config"):
        assert page.tables[table][0][1:] == [str(run), str(wide)]
        assert all(len(row) == 3 for row in page.tables[table])


def test_settings_that_differ_are_marked(compared: str):
    marked = set(re.findall(r'<tr class="differs"><td><code>([a-z_.]+)</code>', compared))
    by_the_table = {"model.integers", "train.patience"}  # which follow from its columns and rows
    assert marked == {"data.name", "data.path", "data.samples", "model.integers", "train.patience"} | by_the_table


def test_names_are_escaped(run: Path, tmp_path: Path):
    odd = shutil.copytree(run, tmp_path / "<script>alert(1)</script>".replace("/", "∕"))
    text = run_report(odd)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_of_weights_without_metrics_nothing_is_said_about_training(run: Path, tmp_path: Path):
    """And beside a run, only of the run."""
    ef.save_pretrained(run, tmp_path / "alone")
    page = Page(run_report(tmp_path / "alone"))
    assert len(page.images) == 2  # no curves
    assert not {"best validation nll (nats)", "at step"} & {name for name, *_ in page.tables["results"]}
    assert [name for name, *_ in page.tables["timings"][1:]] == ["log-likelihood, per row", "sample, per row"]
    both = Page(run_report(run, tmp_path / "alone"))
    assert len(both.images) == 5
    (cells,) = [cells for name, *cells in both.tables["results"] if name == "at step"]
    assert cells[0] != "–"
    assert cells[1] == "–"


def test_certificates_bound_the_true_norm(trained: Trained):
    rows = trained.data().test
    (found,) = certificates(trained.model, rows)
    weight = trained.model.get_submodule(found.name).weight.detach().double()
    assert torch.linalg.matrix_norm(weight, ord=2) <= found.norm * (1 + 1e-6)
    assert torch.linalg.eigvalsh((weight + weight.T) / 2).max() <= found.log_norm + 1e-6
    columns = ef.expm_apply(ef.DenseOperator(weight.float()), torch.eye(2), terms=found.plan).double()
    error = (columns - torch.linalg.matrix_exp(weight).T).norm(dim=1).max()
    assert 0 < error <= found.plan.error_bound * math.exp(max(found.log_norm, 0))
    assert found.plan.truncation_bound <= found.plan.error_bound <= found.plan.proven_bound < 1e-4


def test_density_is_the_model_and_has_most_of_its_mass_in_view(trained: Trained):
    place, values = trained.kind.landscape(trained.data().train), density(trained, trained.data().train)
    x0, x1, y0, y1 = place.extent
    values = values.reshape(place.side, place.side)
    corner = trained.log_likelihoods(torch.tensor([[x0, y0], [x1, y0]], dtype=torch.float64)).exp()
    torch.testing.assert_close(torch.stack([values[0, 0], values[0, -1]]), corner, rtol=1e-4, atol=1e-8)
    area = (x1 - x0) * (y1 - y0)
    assert 0.5 < float(values.mean()) * area < 1.02


def test_round_trip_is_small(trained: Trained):
    assert 0 <= round_trip(trained, trained.data().test) < 1e-4
    assert summarise(trained).round_trip < 1e-4


@pytest.mark.parametrize("columns", [1, 2, 14])
def test_figures_of_any_width(tmp_path: Path, columns: int):
    rows = torch.randn(50, columns, generator=torch.Generator().manual_seed(0))
    rows[:, 0] = 1.0  # a constant column has no range
    for data in (None, rows):
        save_figure(columns_figure(data, rows), tmp_path / "figure")
        assert (tmp_path / "figure").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_browser_shows_it(compared: str, tmp_path: Path):
    (tmp_path / "report.html").write_text(compared, encoding="utf-8")
    widths = shown_widths(tmp_path / "report.html", tmp_path)
    assert len(widths) == 5
    assert all(width > 300 for width in widths)


def test_every_validation_is_inside_the_plot(trained: Trained):
    """Of a run that overfits: training falls, and validation rises far above it."""
    records = [{"step": k, "nll": 2 - 0.01 * k, "lr": 0.1} for k in range(100)]
    records += [{"step": k, "validation_nll": 1 + k} for k in range(0, 100, 10)]
    figure = curves_figure([dataclasses.replace(summarise(trained), records=records)])
    low, high = figure.axes[0].get_ylim()
    assert low < 1 < 91 < high


def test_the_single_record_of_a_short_run_is_visible(trained: Trained):
    records = [{"step": 50, "nll": 2.0, "lr": 0.1}, {"step": 50, "validation_nll": 1.0}]
    figure = curves_figure([dataclasses.replace(summarise(trained), records=records)])
    assert all(line.get_marker() == "o" for axis in figure.axes for line in axis.lines)


def test_settings_are_those_that_apply_and_the_page_says_when_and_where(run: Path):
    page = run_report(run)
    config = {name for name, *_ in Page(page).tables["config"]}
    assert {"data.name", "data.samples", "data.validation", "data.test"} <= config
    assert not {"data.size", "data.crop", "data.flip", "data.path"} & config
    assert all(cells != ["–"] for _, *cells in Page(page).tables["config"])
    assert datetime.now().astimezone().strftime("%Y-%m-%d") in page
    assert f"{platform.system()} {platform.machine()}" in page


def test_scores_have_a_histogram(trained: Trained):
    summary = summarise(trained)
    (axis,) = scores_figure(summary).axes
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert [label.split()[0] for label in labels] == ["train", "validation", "test"]
    assert all(f"({summary.known.counts[label.split()[0]]} rows" in label for label in labels)


def test_columns_have_their_names_and_what_is_left_out_is_said():
    rows = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    figure = columns_figure(rows, rows, [f"name {k}" for k in range(30)])
    shown = [axis.get_title(loc="left") for axis in figure.axes if axis.get_title(loc="left")]
    assert shown == [f"name {k}" for k in range(12)]
    assert figure.get_suptitle() == "12 of 30 columns"
    plane = columns_figure(None, rows[:, :2], ("width", "height"))
    assert (plane.axes[0].get_xlabel(), plane.axes[0].get_ylabel()) == ("width", "height")
