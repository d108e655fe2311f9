# Every target sets up what it needs in .venv, and only when pyproject.toml or constraints.txt has changed.
# Another interpreter: make test PYTHON=python3.12. Another number of test workers: make test JOBS=8.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install
TORCH := $(shell grep '^torch==' constraints.txt)
DEMO_EXTRAS := train,report
ALL_EXTRAS := train,report,graph,peers,dev

DEMO_READY := $(VENV)/.ready-demo
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test slow lint types bench docs clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO_READY) ## train two flows on digits and compare them; writes runs/demo/report.html
	$(PY) -m expmflow.demo --out runs/demo

# One thread per worker: two workers with two threads each would fight over two cores.
test: $(READY) ## run the tests, the docstrings' examples among them
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS)

slow: $(READY) ## run the tests that take more than a few seconds each
	$(PY) -m pytest -m slow

lint: $(READY) ## check style and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY) ## check the types of src
	$(PY) -m mypy

bench: $(READY) ## measure the exponential against its alternatives
	$(PY) benchmarks/run.py

docs: $(READY) ## write the documentation to docs/_build/html
	$(PIP) -c constraints.txt -e '.[docs]'
	$(PY) -m sphinx -q -b html docs docs/_build/html

clean: ## remove caches and builds; keeps .venv, runs and data
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf $(VENV)

# torch comes first and alone: resolved together with the rest, it would bring several GB of GPU packages.
$(VENV)/.$(TORCH):
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Expected Python 3.11 or newer; got {v[0]}.{v[1]}. Name another with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	@touch '$@'

$(DEMO_READY): pyproject.toml constraints.txt $(VENV)/.$(TORCH)
	$(PIP) -c constraints.txt -e '.[$(DEMO_EXTRAS)]'
	@touch $@

# The full set contains the demo's, so both stamps are set.
$(READY): pyproject.toml constraints.txt $(VENV)/.$(TORCH)
	$(PIP) -c constraints.txt -e '.[$(ALL_EXTRAS)]'
	@touch $@ $(DEMO_READY)
