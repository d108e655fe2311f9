"""The paper's tables, each a list of runs that resume after an interruption."""
