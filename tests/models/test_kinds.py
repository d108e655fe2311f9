"""Kinds of mixing and of subflow: one entry of a registry is all that a new one takes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NEW = {
    "mixing": ('    "1x1": _conv1x1,', '    "twice": lambda *given: [*_conv1x1(*given), *_conv1x1(*given)],'),
    "subflows": (
        '    "coupling": Subflow(_coupling, mixed=True),',
        '    "twice": Subflow(lambda *given: T.Chain([_coupling(*given), _coupling(*given)]), mixed=True),',
    ),
}
IN_ANOTHER_PROCESS = """
import importlib.machinery, sys

name, after, entry = sys.argv[1:]
original = importlib.machinery.SourceFileLoader.get_code


def get_code(self, module):
    if module != f"expmflow.models.{name}":
        return original(self, module)
    source = self.get_source(module)
    assert source.count(after) == 1
    return compile(source.replace(after, f"{after}\\n{entry}"), self.path, "exec")


importlib.machinery.SourceFileLoader.get_code = get_code

import pytest
import torch
from cli_runs import run_command
from expmflow.models import image_flow
from expmflow.training.config import ConfigError, load_config

setting = {"mixing": "mixing", "subflows": "subflow"}[name]
config = load_config("image-coupling", [f"model.{setting}=twice", "model.levels=1", "model.subflows=1"])
model = config.model.build((1, 4, 4)).eval()
y = torch.randn(2, 1, 4, 4)
torch.testing.assert_close(model.flow.decode(model.flow.encode(y)), y, rtol=0, atol=1e-5)
with pytest.raises(ConfigError, match="'twice'"):
    load_config("image-coupling", [f"model.{setting}=thrice"])
with pytest.raises(ValueError, match=f"Expected {setting} to be one of .*twice.*; got 'thrice'"):
    image_flow((1, 4, 4), **{setting: "thrice"})
assert "twice" in run_command("train", "--help").out
print("all of them know it")
"""


@pytest.mark.parametrize("registry", NEW)
def test_a_new_kind_is_one_entry(registry: str) -> None:
    """Configs, help, messages and models know it then, and nothing else has to be told."""
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, registry, *NEW[registry]],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "all of them know it\n", done.stderr
