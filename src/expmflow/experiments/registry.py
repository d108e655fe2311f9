"""All tables by name; a new one is one entry."""

from __future__ import annotations

from typing import Any

from expmflow.experiments.ablation import ABLATION
from expmflow.experiments.experiment import Experiment
from expmflow.experiments.graph import GraphTable
from expmflow.experiments.mixing import MIXING
from expmflow.experiments.residual import RESIDUAL
from expmflow.experiments.vae import VAE_TABLE

TABLES: tuple[Experiment[Any], ...] = (MIXING, RESIDUAL, ABLATION, GraphTable(), VAE_TABLE)
EXPERIMENTS = {table.name: table for table in TABLES}
