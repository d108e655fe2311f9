"""`python -m expmflow` is `expmflow`, which `torchrun -m` needs."""

from expmflow.cli import main

if __name__ == "__main__":
    main()
