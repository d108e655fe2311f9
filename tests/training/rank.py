"""One of several processes of a training run; the environment says which, as `torchrun` does."""

import sys
from pathlib import Path

from image_run import make_config, run

if __name__ == "__main__":
    run(Path(sys.argv[1]), make_config(steps=10, precision="float64", checkpoint_every=10, validate_every=5))
