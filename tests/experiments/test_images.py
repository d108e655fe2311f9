"""The paper's image tables: rows of one size and one skeleton, trained, resumed, measured and compared."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cli_runs import Outcome, run_command
from expmflow import transforms as T
from expmflow.data import Dataset, images
from expmflow.distributions.describe import count_parameters
from expmflow.experiments.ablation import ABLATION
from expmflow.experiments.curves import curves_figure
from expmflow.experiments.images import ImageTable, Setting, at_higher_rates
from expmflow.experiments.mixing import MIXING
from expmflow.experiments.registry import EXPERIMENTS
from expmflow.experiments.residual import RESIDUAL
from expmflow.experiments.values import Values, likelihood_comparisons, paired_differences
from expmflow.nn import ConvNet
from expmflow.training.build import build_model
from expmflow.training.checkpoint import newest_checkpoint
from expmflow.training.config import Config

SHAPE = (3, 32, 32)
TABLES = [table for table in EXPERIMENTS.values() if isinstance(table, ImageTable)]
ROWS = [
    pytest.param(table, row, id=f"{table.name}-{row.name}")
    for table in TABLES
    for row in table.rows("laptop")
    if row.seed == 0
]


def small_images() -> Dataset:
    """Ramps of grey with noise on them, 8 × 8 pixels."""
    generator = torch.Generator().manual_seed(0)
    ramp = 20 * torch.arange(8) + 40 * torch.randint(2, (60, 1, 1, 1), generator=generator)
    rows = (ramp + torch.randint(12, (60, 3, 8, 8), generator=generator)).to(torch.uint8)
    return Dataset(rows[:40], rows[40:48], rows[48:], levels=256, kind="images")


TINY = Setting(
    "tiny",
    {
        **MIXING.settings["laptop"].model,
        "subflows": 1,
        "depth": 1,
        "growth": 3,
        "width": 3,
        "dequantization_subflows": 1,
        "dequantization_growth": 2,
        "dequantization_depth": 1,
    },
    optim={"optimizer": "adam", "clip": 1000.0},
    train={"steps": 4, "batch_size": 8, "log_every": 1, "validate_every": 2, "checkpoint_every": 2},
    rates=(1e-3, 1e-2),
    rate_steps=2,
    seeds=(0, 1),
    images=10,
    weighed_images=3,
    samples=4,
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(images, "load_cifar10", lambda folder, progress: small_images())
    monkeypatch.setattr(MIXING, "settings", {**MIXING.settings, "laptop": TINY})
    return monkeypatch


def reproduce(folder: Path, *arguments: str) -> Outcome:
    places = ("--runs", folder / "runs", "--results", folder / "results", "--threads", "1")
    return run_command("reproduce", "mixing", *places, *arguments)


def rows_of(folder: Path) -> list[dict]:
    return json.loads((folder / "results" / "mixing.json").read_text())["rows"]


class TestSkeleton:
    @pytest.mark.parametrize(("table", "row"), ROWS)
    def test_every_row_can_be_built(self, table, row):
        config = row.config("laptop")
        model = build_model(config, SHAPE)
        assert count_parameters(model) > 100_000 or not row.cell.matched
        for preset in table.presets:
            other = row.config(preset)
            assert (other.data.name, other.model.kind, other.train.seed) == ("cifar10", "image", 0)

    @pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
    @pytest.mark.parametrize("preset", ["laptop", "paper", "authors"])
    def test_rows_differ_in_the_layer_alone(self, table, preset):
        """All else is the same: splits, dequantization, data, schedule."""
        own = {key for cell in table.cells for key in cell.model}
        own |= {key for sizes in table.settings[preset].sizes.values() for key in sizes}
        rows = [row.config(preset) for row in table.rows(preset) if row.seed == 0]
        for config in rows:
            assert (config.data, config.optim, config.train) == (rows[0].data, rows[0].optim, rows[0].train)
            shared = config.model.model_dump(exclude=own)
            assert shared == rows[0].model.model_dump(exclude=own)

    @pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
    def test_parameters_are_matched_within_two_percent(self, table):
        """In groups of the same dequantization, since noise from a flow has parameters of its own."""
        groups: dict[str, list[int]] = {}
        for row in table.rows("laptop"):
            if row.seed == 0 and row.cell.matched:
                config = row.config("laptop")
                count = count_parameters(build_model(config, SHAPE))
                groups.setdefault(config.model.dequantization, []).append(count)
        for counts in groups.values():
            assert len(counts) > 1
            assert max(counts) <= 1.02 * min(counts)

    def test_norms_are_constrained_where_the_papers_are(self):
        """Inside f_AR; the triangular convolutions of the row without it have none."""
        for preset, expected in (("laptop", None), ("paper", 1.5), ("authors", 1.5)):
            for row in ABLATION.rows(preset):
                free = row.cell.name.startswith("no-ar")
                assert row.config(preset).model.lipschitz == (None if free else expected), row.name

    @pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
    def test_rows_are_compared_with_others_of_the_table(self, table):
        names = [cell.name for cell in table.cells]
        for cell in table.cells:
            assert set(cell.against) <= set(names) - {cell.name}
            assert len(set(cell.against)) == len(cell.against)

    @pytest.mark.parametrize("table", [MIXING, RESIDUAL], ids=lambda table: table.name)
    def test_the_preset_paper_has_the_settings_of_the_appendix(self, table):
        for row in table.rows("paper"):
            config = row.config("paper")
            model, optim, train = config.model, config.optim, config.train
            subflows = {"mixing": 10, "residual": 10 if "half" in row.name else 20}[table.name]
            assert (model.levels, model.subflows, model.dequantization_subflows) == (2, subflows, 4)
            assert (optim.optimizer, optim.lr, optim.decay, train.batch_size) == ("adam", 1e-3, 0.995, 256)
            assert train.steps == 1000 * (40_000 // 256)
            if table is MIXING:
                assert (model.depth, model.growth) == (8, 64 if "1x1" in row.name else 63)
                assert optim.betas == (0.9, 0.999)
            else:
                assert (model.hidden, optim.betas) == (528, (0.9, 0.99))

    def test_names_are_unique_and_the_first_seed_comes_first(self):
        for table in TABLES:
            for preset in table.presets:
                rows = table.rows(preset)
                assert len({row.name for row in rows}) == len(rows)
                assert [row.seed for row in rows] == sorted(row.seed for row in rows)


def with_subflows(config: Config, count: int) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"subflows": count})})


def whole(config: Config, count: Callable[[nn.Module], int]) -> int:
    """The parameters of a model with many subflows, of which each adds the same."""
    one, two = (count(build_model(with_subflows(config, subflows), SHAPE)) for subflows in (1, 2))
    return one + (config.model.subflows - 1) * (two - one)


class TestKnownSizes:
    """Parameters that were counted in the authors' code, at the paper's size."""

    SECOND_BIASES = 4 * 64  # our couplings with a context have a bias of their own for it, theirs have one for both
    PIXEL_BIASES = 11 * 2 * 12 * 16**2 + 10 * 2 * 24 * 8**2  # of their exponentials, which ours do without
    MASKED = 11 * 132 + 10 * 552  # what they count of Emerging though a mask keeps it at zero

    @pytest.mark.parametrize(
        ("name", "flow", "dequantizer"),
        [
            ("1x1", 47_846_868, 9_119_000 + 230_192),
            ("convexp", 46_760_760 - PIXEL_BIASES, 8_918_008 - 5 * 2 * 12 * 16**2 + 230_192),
            ("emerging", 46_655_856 - MASKED, 8_886_688 - 5 * 132 + 230_192),
            ("woodbury", 46_762_248, 8_942_248 + 230_192),
        ],
    )
    def test_of_the_mixing_table(self, name, flow, dequantizer):
        (row,) = (row for row in MIXING.rows("authors") if row.name == f"{name}-0")
        model = build_model(row.config("authors"), SHAPE)
        assert count_parameters(model.flow) == flow
        assert count_parameters(model.dequantizer) == dequantizer + self.SECOND_BIASES

    @pytest.mark.parametrize(
        ("name", "first"),
        [("1x1", 144), ("convexp", 7_584 - 2 * 12 * 16**2), ("emerging", 1_188), ("woodbury", 12_432)],
    )
    def test_the_paper_has_one_mixing_layer_fewer_than_the_authors(self, name, first):
        (row,) = (row for row in MIXING.rows("paper") if row.name == f"{name}-0")
        theirs, papers = (
            build_model(with_subflows(row.config(preset), 1), SHAPE).flow for preset in ("authors", "paper")
        )
        assert count_parameters(theirs) - count_parameters(papers) == first

    @pytest.mark.parametrize(
        ("preset", "name", "raw"),
        [
            ("authors", "sylvester-uniform", 50_266_244),
            ("authors", "residual-uniform", 30_618_500 - 48 * 2),  # they count two settings of a block, never trained
            ("paper", "sylvester-uniform", 30_652_828),
            ("paper", "residual-uniform", 20_242_508 - 40 * 2),
        ],
    )
    def test_of_the_residual_table(self, preset, name, raw):
        """Masked weights included and the split's network without gates, as they counted."""
        (row,) = (row for row in RESIDUAL.rows(preset) if row.name == f"{name}-0")
        config = row.config(preset)
        config = config.model_copy(update={"model": config.model.model_copy(update={"gated": False})})
        assert whole(config, lambda model: sum(p.numel() for p in model.parameters())) == raw

    def test_of_its_dequantization(self):
        (row,) = (row for row in RESIDUAL.rows("authors") if row.name == "coupling-variational-0")
        model = build_model(with_subflows(row.config("authors"), 1), SHAPE)
        assert count_parameters(model.dequantizer) == 8_823_576 + 211_440 + self.SECOND_BIASES
        couplings = [layer for layer in model.flow.modules() if isinstance(layer, T.AffineCoupling)]
        plain = {c.channels: count_parameters(c) for c in couplings if isinstance(c.net, ConvNet)}
        assert (plain[12], plain[48]) == (365_388, 622_032)


def test_the_sizes_that_the_page_on_results_states():
    """Up to 30 million in the paper's Table 2; without f_AR a quarter of the parameters, noise apart."""
    largest = next(row for row in RESIDUAL.rows("paper") if row.name == "residual-variational-0").config("paper")
    assert 29e6 < whole(largest, count_parameters) < 30e6
    rows = {row.cell.name: row.config("laptop") for row in ABLATION.rows("laptop")}
    reduced, full = (
        count_parameters(build_model(rows[name], SHAPE).flow) for name in ("no-ar", "sylvester-variational")
    )
    assert 0.22 < reduced / full < 0.27


@pytest.mark.usefixtures("tiny")
class TestReproduce:
    def test_a_row_is_trained_measured_and_written(self, tmp_path: Path):
        outcome = reproduce(tmp_path, "--only", "convexp-0")
        assert outcome.code == 0, outcome.err
        (row,) = rows_of(tmp_path)
        assert (row["model"], row["seed"], row["steps"], row["elbo_images"], row["nll_images"]) == (
            "convexp",
            0,
            4,
            10,
            3,
        )
        assert row["command"] == "expmflow reproduce mixing --preset laptop --only convexp-0"
        assert [step for step, _ in row["curve"]] == [2, 4]
        assert f"{row['elbo']:.4f} bits per dimension (paper 3.237)" not in outcome.err  # the NLL stands in between
        assert f"−ELBO {row['elbo']:.4f}, NLL {row['nll']:.4f} bits per dimension (paper 3.237)" in outcome.err
        folder = tmp_path / "results"
        assert (folder / "mixing.svg").read_text().startswith("<?xml")
        assert "(mixing.svg)" in (folder / "mixing.md").read_text()
        values = np.load(folder / "mixing" / "convexp-0.npy", allow_pickle=False)
        assert (values.dtype, values.shape) == (np.float32, (10,))
        assert float(values.mean()) == pytest.approx(row["elbo"], abs=1e-5)
        assert row["elbo_standard_error"] == pytest.approx(values.std(ddof=1) / 10**0.5, rel=1e-3)
        self.check_evaluate(tmp_path, row)

    def check_evaluate(self, folder: Path, row: dict) -> None:
        """The run gives the same numbers by the command for runs."""
        run = folder / "runs" / "mixing" / "laptop" / "convexp-0"
        elbo = json.loads(run_command("evaluate", run, "--images", "10", "--json").out)
        assert elbo["bpd"] == pytest.approx(row["elbo"], abs=1e-6)
        weighed = run_command("evaluate", run, "--images", "3", "--importance-samples", "4", "--json")
        assert json.loads(weighed.out)["importance_weighted_bpd"] == pytest.approx(row["nll"], abs=1e-6)
        assert "Going on with" in weighed.err  # the samples are kept

    def test_the_best_of_the_rates_is_taken(self, tmp_path: Path):
        assert reproduce(tmp_path, "--only", "1x1-0").code == 0
        (row,) = rows_of(tmp_path)
        assert set(row["tried"]) == {"0.001", "0.01"}
        assert row["lr"] == float(min(row["tried"], key=row["tried"].get))

    def test_a_rate_that_diverges_is_not(self, tmp_path: Path, tiny):
        rates = (1e-3, 1e30)
        tiny.setattr(MIXING, "settings", {**MIXING.settings, "laptop": replace(TINY, rates=rates)})
        assert reproduce(tmp_path, "--only", "1x1-0").code == 0
        (row,) = rows_of(tmp_path)
        assert row["lr"] == 1e-3
        assert math.isfinite(row["elbo"])
        assert f"| 1×1 | 0 | {row['tried']['0.001']:.3f} | – |" in (tmp_path / "results" / "mixing.md").read_text()

    def test_rows_are_compared_on_the_same_images(self, tmp_path: Path):
        assert reproduce(tmp_path, "--only", "1x1-0", "--only", "convexp-0").code == 0
        table = json.loads((tmp_path / "results" / "mixing.json").read_text())
        first, second = (np.load(tmp_path / f"results/mixing/{name}-0.npy") for name in ("1x1", "convexp"))
        (difference,) = table["differences"]
        assert (difference["model"], difference["minus"], difference["seed"]) == ("convexp", "1x1", 0)
        assert difference["elbo"] == pytest.approx(float((second - first).mean()), abs=1e-5)
        text = (tmp_path / "results" / "mixing.md").read_text()
        assert text == MIXING.text(table, "laptop")
        assert f"{difference['elbo']:+.4f} ± {difference['elbo_standard_error']:.4f}" in text
        assert "| convolution exponential | 1×1 | 0 | -0.048 |" in text  # the paper's difference beside ours
        tried = " | ".join(f"{value:.3f}" for value in table["rows"][1]["tried"].values())
        assert "| model | seed | 0.001 | 0.01 |\n| --- | --- | --- | --- |\n| 1×1 | 0 | " in text
        assert f"| convolution exponential | 0 | {tried} |" in text

    def test_a_row_with_a_rate_of_its_own_is_compared_with_the_one_that_was_chosen(self, tmp_path: Path, tiny):
        assert reproduce(tmp_path, "--only", "1x1-0", "--only", "convexp-0", "--only", "emerging-0").code == 0
        again = at_higher_rates(TINY, {"convexp-0": 0.02, "convexp-1": 0.03})
        tiny.setattr(MIXING, "settings", {**MIXING.settings, "higher-rate": again})
        assert [row.name for row in MIXING.rows("higher-rate")] == ["convexp-0", "convexp-1"]
        assert reproduce(tmp_path, "--preset", "higher-rate", "--only", "convexp").code == 0
        table = json.loads((tmp_path / "results" / "mixing-higher-rate.json").read_text())
        assert [(row["lr"], row["tried"]) for row in table["rows"]] == [(0.02, {}), (0.03, {})]
        higher = np.load(tmp_path / "results/mixing-higher-rate/convexp-0.npy")
        differences = table["differences"]  # of the seed that has been trained at both rates
        assert [d["seed"] for d in differences] == [0, 0, 0]
        for difference, name in zip(differences, ("convexp", "1x1", "emerging"), strict=True):
            chosen = np.load(tmp_path / f"results/mixing/{name}-0.npy")
            assert difference["minus"] == f"{name} at the rate that was chosen"
            assert difference["elbo"] == pytest.approx(float((higher - chosen).mean()), abs=1e-5)
        text = (tmp_path / "results" / "mixing-higher-rate.md").read_text()
        others = (("convolution exponential", "–"), ("1×1", "-0.048"), ("Emerging", "-0.008"))  # of itself no claim
        for difference, (label, paper) in zip(differences, others, strict=True):
            line = f"| convolution exponential | {label} at the rate that was chosen | 0 | {paper} |"
            assert f"{line} {difference['elbo']:+.4f} ±" in text
        assert "short training" not in text  # of which there was none

    def test_a_row_that_was_cut_goes_on(self, tmp_path: Path, tiny):
        for place, lengths in (("whole", (4,)), ("parts", (2, 4))):
            for steps in lengths:
                cut = replace(TINY, train={**TINY.train, "steps": steps})
                tiny.setattr(MIXING, "settings", {**MIXING.settings, "laptop": cut})
                (tmp_path / place / "results" / "mixing.json").unlink(missing_ok=True)
                assert reproduce(tmp_path / place, "--only", "1x1-1").code == 0
        found = [
            newest_checkpoint(tmp_path / place / "runs" / "mixing" / "laptop" / "1x1-1" / "checkpoints")
            for place in ("whole", "parts")
        ]
        whole, parts = (checkpoint.tensors["model"] for checkpoint in found if checkpoint is not None)
        assert all(torch.equal(value, parts[name]) for name, value in whole.items())

    def test_a_row_that_is_done_is_not_run_again(self, tmp_path: Path):
        assert reproduce(tmp_path, "--only", "1x1-0").code == 0
        before = rows_of(tmp_path)
        outcome = reproduce(tmp_path, "--only", "1x1-0")
        assert "1x1-0: done already" in outcome.err
        assert rows_of(tmp_path) == before
        listed = reproduce(tmp_path, "--dry-run").out.splitlines()
        assert listed[0].startswith("1x1-0: done, in ")
        assert listed[1] == "convexp-0: 8 steps"  # two rates of two steps, and four

    def test_a_row_that_another_process_trains_is_left_to_it(self, tmp_path: Path, tiny):
        run = tmp_path / "runs" / "mixing" / "laptop" / "1x1-0"
        run.mkdir(parents=True)
        hold = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(); sys.stdin.read()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", hold, run], **pipes) as other:
            other.stdout.readline()
            outcome = reproduce(tmp_path, "--only", "1x1-0", "--only", "woodbury-0")
            other.communicate()
        assert "1x1-0: left to the other process that works on it" in outcome.err
        assert [row["model"] for row in rows_of(tmp_path)] == ["woodbury"]

    def test_what_a_step_takes_is_measured_again(self, tmp_path: Path, tiny):
        tiny.setattr("expmflow.experiments.experiment.TIMED_STEPS", 2)
        assert reproduce(tmp_path, "--only", "1x1-0").code == 0
        (before,) = rows_of(tmp_path)
        assert reproduce(tmp_path, "--time").code == 0
        (after,) = rows_of(tmp_path)
        assert after["seconds_per_step"] > 0
        changed = {key for key in after if after[key] != before.get(key)}
        assert "timed_threads" in changed
        assert changed <= {"seconds_per_step", "timed_threads"}
        outcome = run_command("reproduce", "mixing", "--time", "--results", tmp_path / "none")
        assert outcome.code == 0
        assert outcome.err == f"No row is done in {tmp_path / 'none' / 'mixing.json'}: nothing was measured"
        assert not (tmp_path / "none").exists()

    def test_many_processes_train_all_rows_before_one_measures(self, tmp_path: Path, tiny):
        """The others would wait for it, and give up."""
        order = []
        tiny.setattr(MIXING, "train", lambda row, *arguments, **options: order.append(f"train {row.name}"))
        tiny.setattr(MIXING, "measure", lambda row, *arguments, **options: order.append(f"measure {row.name}"))
        tiny.setattr(MIXING, "save", lambda path, found, preset: None)
        tiny.setattr(MIXING, "summary", str)
        tiny.setenv("WORLD_SIZE", "2")
        for rank, measured in (("0", ["measure 1x1-0", "measure 1x1-1"]), ("1", [])):
            order.clear()
            tiny.setenv("RANK", rank)
            assert reproduce(tmp_path, "--only", "1x1").code == 0
            assert order == ["train 1x1-0", "train 1x1-1", *measured]

    @pytest.mark.parametrize("option", ["--runs", "--results"])
    def test_a_file_in_place_of_a_folder_is_refused_before_anything_is_trained(self, tmp_path: Path, option: str):
        (tmp_path / "file").write_text("a word")
        outcome = reproduce(tmp_path, "--only", "1x1-0", option, tmp_path / "file")
        assert outcome.code == 1
        assert outcome.err == f"Expected {option} to be a folder; got the file {tmp_path / 'file'}."
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_a_preset_of_another_table(self, tmp_path: Path):
        outcome = reproduce(tmp_path, "--preset", "clipped")
        assert outcome.code == 1
        assert (
            outcome.err
            == "Expected --preset of mixing to be one of laptop, paper, authors, higher-rate; got 'clipped'."
        )


class TestResidual:
    def test_random_logdets_are_not_weighed_and_shared_rows_are_trained_once(self, tmp_path: Path, monkeypatch):
        small = {**TINY.model, "subflows": 2, "hidden": 8, "subflow": "sylvester", "actnorm": True}
        setting = replace(TINY, model=small, seeds=(0,), rates=(1e-3,))
        monkeypatch.setattr(images, "load_cifar10", lambda folder, progress: small_images())
        for table in (RESIDUAL, ABLATION):
            monkeypatch.setattr(table, "settings", {**table.settings, "laptop": setting})
        places = ("--runs", tmp_path / "runs", "--results", tmp_path / "results", "--threads", "1")
        for name in ("residual-uniform-0", "sylvester-variational-0"):
            outcome = run_command("reproduce", "residual", "--only", name, *places)
            assert outcome.code == 0, outcome.err
        block, sylvester = json.loads((tmp_path / "results" / "residual.json").read_text())["rows"]
        assert (block["nll"], block["importance_samples"]) == (None, None)
        assert math.isfinite(block["elbo"])
        assert not (tmp_path / "results" / "residual" / "residual-uniform-0-nll.npy").exists()
        assert "| residual block, uniform | 0 | 3.370 |" in (tmp_path / "results" / "residual.md").read_text()
        weights = tmp_path / "results" / "residual" / "sylvester-variational-0"
        elbo = json.loads(run_command("evaluate", weights, "--images", "10", "--json").out)
        assert elbo["bpd"] == pytest.approx(sylvester["elbo"], abs=1e-6)
        outcome = run_command("reproduce", "ablation", "--only", "sylvester-variational-0", *places)
        assert outcome.code == 0, outcome.err
        (again,) = json.loads((tmp_path / "results" / "ablation.json").read_text())["rows"]
        assert (again["elbo"], again["nll"]) == (sylvester["elbo"], sylvester["nll"])
        assert not (tmp_path / "runs" / "ablation").exists()


class TestDifferences:
    def test_a_constant_difference_has_no_error(self):
        generator = torch.Generator().manual_seed(0)
        elbo, nll = torch.randn(50, generator=generator).double(), torch.randn(20, generator=generator).double()
        rows = {
            ("a", 0): Values(elbo, nll),
            ("b", 0): Values(elbo - 0.5, nll - 0.25),
            ("c", 0): Values(elbo + torch.arange(50) % 2, None),
            ("b", 1): Values(elbo, nll),
        }
        against = {"a": ["a"], "b": ["a"], "c": ["a"]}
        b, c = paired_differences(rows, against)  # seed 1 has no first row to be compared with
        assert (b["elbo"], b["elbo_standard_error"], b["nll"]) == (-0.5, 0.0, -0.25)
        assert c["elbo"] == pytest.approx(0.5)
        assert c["elbo_standard_error"] == pytest.approx(float((torch.arange(50) % 2.0).std()) / 50**0.5, abs=1e-6)
        assert "nll" not in c

    def test_values_come_back_and_damage_is_refused(self, tmp_path: Path):
        values = Values(torch.arange(4.0), torch.arange(2.0))
        values.save(tmp_path / "folder", "row")
        back = Values.load(tmp_path / "folder", "row")
        assert torch.equal(back.elbo, values.elbo.double())
        assert torch.equal(back.nll, values.nll.double())
        (tmp_path / "folder" / "row.npy").write_bytes(b"no array")
        with pytest.raises(ValueError, match="Expected likelihoods in"):
            Values.load(tmp_path / "folder", "row")
        with pytest.raises(ValueError, match="Expected the likelihoods of the test images in"):
            Values.load(tmp_path / "folder", "other")

    def test_the_paper_beside_seeds_that_are_averaged(self):
        paper = {"elbo": 3.285, "elbo_error": 0.008}
        rows = [
            {"model": "1x1", "paper": paper, "elbo": elbo, "nll": None, "elbo_standard_error": 0.5}
            for elbo in (4.0, 4.2)
        ]
        (several,) = likelihood_comparisons(rows, {"1x1": "1×1"})
        (single,) = likelihood_comparisons(rows[:1], {"1x1": "1×1"})
        assert (several.of, several.unit, several.paper) == ("1×1", "−ELBO, bits per dimension", 3.285)
        assert several.ours == pytest.approx(4.1)
        assert several.error == pytest.approx(0.2 / 2**0.5)
        assert (single.ours, single.error, single.paper_error) == (4.0, 0.5, 0.008)

    def test_what_is_not_finite_is_refused(self):
        with pytest.raises(ValueError, match="Expected a finite likelihood of every test image"):
            Values(torch.tensor([1.0, math.inf]), None).measures()


def test_the_legend_of_the_curves_is_beside_them():
    labels = {f"{k}": f"a layer with a long name, and the number {k}" for k in range(8)}
    curve = [[100 * k, 4 - 0.1 * k] for k in range(1, 10)]
    rows = [{"model": name, "seed": 0, "seconds_per_step": 0.1, "curve": curve} for name in labels]
    figure = curves_figure(rows, labels)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(labels.values())
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
    for axis in figure.axes:
        assert axis.get_legend() is None
        assert axis.get_tightbbox().x1 <= box.x0


def test_folders_of_shared_rows(tmp_path: Path):
    row, runs = MIXING.rows("laptop")[0], tmp_path / "mixing" / "laptop"
    assert MIXING.run_folder(row, runs) == runs / "1x1-0"
    shared = replace(row, cell=replace(row.cell, shared="residual"))
    assert MIXING.run_folder(shared, runs) == tmp_path / "residual" / "laptop" / "1x1-0"
