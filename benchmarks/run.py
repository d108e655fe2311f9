"""Measure everything and write the tables into benchmarks/README.md: `make bench`, on an otherwise idle machine.

python benchmarks/run.py [--only NAME ...] [--rounds N] [--no-write]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import exponential
import exponential_layers
import graph_models
import image_models
import image_training
import inverses
import layers
import paper_models
import residual
import sparse
import tables
import waiting
import wavefronts
from timing import machine

README = Path(__file__).parent / "README.md"
SECTIONS: dict[str, Callable[[int], str]] = {
    "evaluation": exponential.evaluation,
    "training": exponential.training,
    "peers": exponential.peers,
    "layers": layers.images,
    "otherlayers": layers.vectors_and_graphs,
    "emerging": wavefronts.against_pixels,
    "iterations": inverses.iterations,
    "roundtrip": inverses.round_trip,
    "constraint": exponential_layers.constraint_share,
    "gradients": exponential_layers.gradient_modes,
    "dense": exponential_layers.against_pyro,
    "residual": residual.training_memory,
    "heat": sparse.heat,
    "graphs": sparse.convolution,
    "products": sparse.products,
    "memory": sparse.memory,
    "imagemodels": image_models.training_step,
    "sylvestermodel": image_models.sylvester_step,
    "papermodels": paper_models.relative_to_1x1,
    "graphmodels": graph_models.training_step,
    "waiting": waiting.waiting_threads,
    "tables": tables.against_nsf,
    "tablesteps": tables.steps_of_nsf,
    "imagetraining": image_training.whole_training,  # last: it needs CIFAR-10
}


def replace_section(text: str, name: str, content: str) -> str:
    """The README with what stands between the section's two markers replaced."""
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"Expected markers for the section {name!r} in {README}; got none.")
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15, help="timings per candidate (default 15)")
    parser.add_argument("--no-write", action="store_true", help="print the tables only")
    arguments = parser.parse_args()
    print(machine(), flush=True)
    for name in arguments.only:
        content = SECTIONS[name](arguments.rounds)
        print(f"\n{name}\n\n{content}", flush=True)
        if not arguments.no_write:
            text = replace_section(README.read_text(), name, content)
            README.write_text(replace_section(text, "machine", machine()))


if __name__ == "__main__":
    main()
