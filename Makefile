# `make train` and `make test` need Python 3.11 or newer and make; they create .venv and everything in it.
PYTHON ?= python3
# The version everything is tested with; any torch >= 2.11 that is already in .venv is kept.
TORCH ?= torch==2.13.0
VENV := .venv
PIP := $(VENV)/bin/pip --disable-pip-version-check
# Scripts run from the root would otherwise see the folders `kernels`, `models`, `train` as packages.
export PYTHONSAFEPATH := 1

.PHONY: train test lint clean

train: $(VENV)/train.ok
	$(VENV)/bin/evenload train tiny

test: $(VENV)/test.ok
	$(VENV)/bin/pytest

lint: $(VENV)/lint.ok
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@# mypy on an editable install with a package map checks almost nothing, so it reads an installed copy.
	@rm -rf build && $(PIP) install --quiet --no-deps --no-build-isolation --target build/typed .
	MYPYPATH=build/typed $(VENV)/bin/mypy -p evenload

clean:
	rm -rf $(VENV) build *.egg-info runs

$(VENV)/python.ok:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"evenload needs Python 3.11 or newer, this is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -c 'import torch' 2>/dev/null || $(PIP) install --quiet $(TORCH)
	@touch $@

$(VENV)/train.ok: $(VENV)/python.ok setup.cfg pyproject.toml
	$(PIP) install --quiet --editable '.[train]'
	@touch $@

$(VENV)/test.ok: $(VENV)/train.ok
	$(PIP) install --quiet --editable '.[train,test]'
	@touch $@

$(VENV)/lint.ok: $(VENV)/test.ok
	$(PIP) install --quiet --editable '.[train,test,dev]'
	@touch $@
