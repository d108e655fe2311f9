"""One of several processes of a training run; the environment says which, as `torchrun` does."""

import sys
from pathlib import Path

from image_run import make_config, run

if __name__ == "__main__":
    folder, kind, precision, steps = sys.argv[1:]
    config = make_config(int(steps), kind, precision=precision, checkpoint_every=10, validate_every=5)
    run(Path(folder), config, kind)
