"""The paper's figures: the facts behind them, and that each is written in both formats."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from cli_runs import files, run_command, train_tiny
from expmflow.experiments import feature_maps
from expmflow.experiments.figures import FIGURES, Sources, write_figure
from expmflow.experiments.figures.bound import NORMS, TERMS, bound_figure, measured_terms
from expmflow.experiments.figures.matrices import KERNEL, PADDINGS, SIZE, equivalent_matrices
from expmflow.experiments.figures.samples import GRAPHS, graphs_figure, samples_figure, samples_source
from expmflow.experiments.figures.terms import photograph
from expmflow.runs.shipped import shipped

RESULTS = Path(__file__).parents[2] / "results"
MODES = {"zeros": "constant", "circular": "circular", "reflect": "reflect"}


class TestMatrices:
    @pytest.mark.parametrize("padding", PADDINGS)
    def test_are_those_of_the_convolution(self, padding):
        matrix, exponential = equivalent_matrices(padding)
        units = torch.eye(SIZE**2, dtype=torch.float64).reshape(-1, 1, SIZE, SIZE)
        kernel = torch.tensor(KERNEL, dtype=torch.float64)[None, None]
        columns = F.conv2d(F.pad(units, (1, 1, 1, 1), mode=MODES[padding]), kernel).flatten(1)
        torch.testing.assert_close(matrix, columns.T)
        torch.testing.assert_close(torch.linalg.slogdet(exponential).logabsdet, matrix.trace())
        series = sum(torch.linalg.matrix_power(matrix, i) / float(math.factorial(i)) for i in range(40))
        torch.testing.assert_close(exponential, series)

    def test_differ_by_their_edges_alone(self):
        inner = [k for k in range(SIZE**2) if {k // SIZE, k % SIZE} <= {1, 2, 3}]
        rows = [equivalent_matrices(padding)[0][inner] for padding in PADDINGS]
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0], rows[2])


class TestBound:
    @pytest.mark.parametrize("norm", NORMS)
    def test_every_term_stays_below_it(self, norm):
        terms = measured_terms(norm)
        assert terms.bound[1] == norm
        assert terms.worst[1] == pytest.approx(norm)  # reached by the first term
        rounding = 1 + 1e-12
        for bound, worst, picture in zip(terms.bound, terms.worst, terms.picture, strict=True):
            assert picture <= worst * rounding
            assert worst <= bound * rounding

    def test_terms_are_those_of_the_series(self):
        """Whatever the norm, term i scales with its i-th power."""
        small, large = measured_terms(0.5, 6), measured_terms(1.5, 6)
        assert [b / a for a, b in zip(small.worst, large.worst, strict=True)] == pytest.approx([3**i for i in range(7)])

    def test_no_mark_is_cut_at_the_edge(self):
        (axis,) = bound_figure().axes
        left, right = axis.get_xlim()
        assert left < 0
        assert right > TERMS

    def test_wrong_arguments(self):
        with pytest.raises(ValueError, match="Expected a positive norm; got 0"):
            measured_terms(0.0)


class TestTerms:
    def test_picture_is_a_photograph(self):
        x = photograph()
        assert x.shape == (1, 1, 120, 120)
        assert 0 <= x.min() < 0.05
        assert 0.8 < x.max() <= 1
        assert len(x.unique()) > 5000  # no drawing

    def test_errors_stay_within_their_certificates(self):
        outcome = feature_maps.run(photograph())
        assert 0 < outcome.measured <= outcome.proven < 1e-5
        assert 0 < outcome.round_trip_measured <= outcome.round_trip_proven < 1e-5

    def test_terms_add_up_both_ways_and_stay_below_their_bound(self):
        x, op = photograph().double(), feature_maps.edge_operator(torch.float64)
        norm = float(op.norm_bound(x.shape[1:]))
        assert norm <= 1.21  # 0.6 + 0.6, and what the sampling of frequencies costs
        forward = feature_maps.series_terms(op, x, 25)
        z = sum(forward)
        torch.testing.assert_close(z, feature_maps.exact_exponential(x))
        torch.testing.assert_close(sum(feature_maps.series_terms(-op, z, 25)), x)
        for i, term in enumerate(forward):
            assert term.norm() <= norm**i / math.factorial(i) * x.norm()


class TestSource:
    def weights(self, folder: Path) -> Path:
        return Path(shutil.copytree(shipped()["digits"], folder))

    def test_is_the_best_row_with_weights(self, tmp_path: Path):
        rows = [
            {"model": "sylvester", "seed": 0, "elbo": 3.4},
            {"model": "sylvester", "seed": 1, "elbo": 3.3},
            {"model": "sylvester", "seed": 2, "elbo": 3.2},  # whose weights were not left
        ]
        (tmp_path / "residual.json").write_text(json.dumps({"rows": rows}))
        for seed in (0, 1):
            self.weights(tmp_path / "residual" / f"sylvester-{seed}")
        assert samples_source(tmp_path, None).folder.path == tmp_path / "residual" / "sylvester-1"
        assert samples_source(tmp_path, "digits").name == "digits"

    def test_comes_with_the_package_otherwise(self, tmp_path: Path):
        assert samples_source(tmp_path, None).name == "digits"

    def test_is_named_above_the_samples(self):
        (axis,) = samples_figure(samples_source(RESULTS, None)).axes
        assert axis.get_title() == "Samples of a convolutional Sylvester flow trained on CIFAR-10"

    def test_must_be_of_images(self, tmp_path: Path):
        run = train_tiny(tmp_path / "moons")
        outcome = run_command("figures", "--only", "samples", "--run", run, "--out", tmp_path / "figures")
        assert outcome.code == 1
        assert outcome.err == "Expected --run to be a model of images; got events of shape (2,)."
        assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "graphs" else n for n in FIGURES])
def test_each_is_written_in_both_formats(name: str, tmp_path: Path):
    outcome = run_command("figures", "--only", name, "--out", tmp_path / "new", "--results", RESULTS)
    assert outcome.code == 0, outcome.err
    assert files(tmp_path) == {f"new/{name}.png", f"new/{name}.svg"}
    with Image.open(tmp_path / "new" / f"{name}.png") as picture:
        assert min(picture.size) > 500
        assert len(picture.convert("RGB").resize((60, 60)).getcolors(3600)) > 20  # not an empty page
    assert ElementTree.parse(tmp_path / "new" / f"{name}.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
def test_marks_of_the_graphs_are_explained():
    assert graphs_figure(RESULTS).get_supxlabel() == f"The nodes of {GRAPHS} graphs; circles are those of one of them"


def test_the_same_figure_is_the_same_file(tmp_path: Path):
    first, second = (write_figure("bound", tmp_path / folder, Sources(), ["svg"])[0] for folder in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_an_unknown_name_is_refused(tmp_path: Path):
    outcome = run_command("figures", "--only", "cat", "--out", tmp_path / "figures")
    assert outcome.code == 2
    assert "'cat' is not one of" in outcome.err
    assert all(name in outcome.err for name in FIGURES)
    assert not (tmp_path / "figures").exists()


def test_missing_weights_are_named_before_anything_is_drawn(tmp_path: Path):
    arguments = ("--only", "bound", "--only", "graphs", "--out", tmp_path / "figures", "--results", tmp_path)
    outcome = run_command("figures", *arguments)
    assert outcome.code == 1
    assert outcome.err.startswith("Expected the weights of the graph flows in ")
    assert outcome.err.endswith("got none of mog-4-coupling-0.")
    assert not (tmp_path / "figures").exists()


def test_what_has_no_weights_is_left_out_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr("expmflow.cli.figures.write_figure", lambda name, *rest: drawn.append(name) or [])
    monkeypatch.chdir(tmp_path)
    outcome = run_command("figures")
    assert outcome.code == 0
    assert "graphs: left out. Expected the weights of the graph flows in results/graph " in outcome.err
    assert drawn == ["matrix", "terms", "bound", "samples"]


def test_results_must_be_there_if_they_are_named(tmp_path: Path):
    outcome = run_command("figures", "--out", tmp_path / "figures", "--results", tmp_path / "nowhere")
    assert outcome.code == 1
    assert outcome.err == f"Expected --results to be a folder; got none at {tmp_path / 'nowhere'}."
    assert not (tmp_path / "figures").exists()


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "figures").write_text("a word")
    outcome = run_command("figures", "--out", tmp_path / "figures")
    assert outcome.code == 1
    assert outcome.err.startswith("Expected --out to be a folder; got the file ")
