# `make train` and `make test` need Python 3.11 or newer and make; they create .venv and everything in it.
PYTHON ?= python3
# The version everything is tested with; any torch >= 2.11 that is already in .venv is kept.
TORCH ?= torch==2.13.0
VENV := .venv
PIP := $(VENV)/bin/pip --disable-pip-version-check
# Scripts run from the root would otherwise see the folders `kernels`, `models`, `train` as packages.
export PYTHONSAFEPATH := 1

.PHONY: train test lint docs notebooks installed-copy clean

train: $(VENV)/train.ok
	$(VENV)/bin/evenload train tiny

# Three files of tests at a time: some wait for processes that were killed.
test: $(VENV)/test.ok
	$(VENV)/bin/pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/lint.ok installed-copy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	MYPYPATH=build/typed $(VENV)/bin/mypy -p evenload

# The site: open site/index.html, or `python3 -m http.server -d site` for its search too.
docs: $(VENV)/docs.ok installed-copy
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

# Runs every notebook from scratch and stores what it prints and draws.
notebooks: $(VENV)/test.ok
	$(VENV)/bin/python notebooks/execute.py

# In the repository the package is spread over folders (setup.cfg), which mypy and the API reference do not see as one.
installed-copy: $(VENV)/test.ok
	@rm -rf build && $(PIP) install --quiet --no-deps --no-build-isolation --target build/typed .

clean:
	rm -rf $(VENV) build site *.egg-info runs

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

$(VENV)/docs.ok: $(VENV)/test.ok
	$(PIP) install --quiet --editable '.[train,test,docs]'
	@touch $@
