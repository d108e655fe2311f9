"""A compiled model trains as the plain one does."""

from pathlib import Path

import pytest
import torch
import torch._dynamo

from expmflow.runs.pretrained import load
from expmflow.training.config import load_config
from expmflow.training.loop import train
from expmflow.training.run import RunFolder

SETTINGS = ["data.samples=400", "model.blocks=1", "model.hidden=8", "train.batch_size=32", "train.log_every=1"]


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler has warnings of its own
def test_losses_are_the_same(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses = {}
    for compiled in ("false", "true"):
        folder = tmp_path / compiled
        config = load_config(
            "moons", [*SETTINGS, "train.steps=6", "train.validate_every=3", f"train.compile={compiled}"]
        )
        train(config, folder)
        losses[compiled] = torch.tensor(
            [m.get("nll", m.get("validation_nll")) for m in RunFolder(folder).read_metrics()], dtype=torch.float64
        )
    assert compiled_graphs() > 0
    assert len(losses["true"]) == 8
    torch.testing.assert_close(losses["true"], losses["false"], rtol=1e-4, atol=1e-4)
    plain = load(tmp_path / "false").state_dict()
    for name, value in load(tmp_path / "true").state_dict().items():  # the names are those of the plain model
        torch.testing.assert_close(value, plain[name], rtol=1e-2, atol=1e-3, msg=name)
