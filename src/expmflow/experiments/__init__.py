"""The paper's tables, each a list of runs that can be cut and resumed."""
