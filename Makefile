# `make demo` and `make test` work from a clean checkout; everything is installed into .venv.
PYTHON ?= python3
# Exact version: a range would resolve to a newer build that drags in gigabytes of CUDA packages.
# Triton, which GPU builds bring along, here only to interpret and compile kernels in tests.
TORCH  ?= torch==2.13.0 triton==3.6.0
# Where the base Python already has torch (a GPU image, say), the venv borrows it instead of installing one.
HAS_TORCH := $(shell $(PYTHON) -c "import torch" 2>/dev/null && echo yes)
BIN := .venv/bin
# Test processes, which take files in order: those that start ranks of their own, the slow ones, come first.
WORKERS ?= 2

.PHONY: demo test test-all lint docs bench clean

demo: .venv/installed
	$(BIN)/python -m flatfsdp verify --steps 6 --out out/demo
	$(BIN)/python -m flatfsdp verify --matrix --ranks 4 --only "pp 2 x tp 2 + SP," --out out/demo

test: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Also kernels that have passed as they are, and every case of cross products: see tests/support/selection.py.
test-all: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --all-tests

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in out/site; any warning is an error.  The variable silences an advertisement of the theme.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: .venv/installed
	$(BIN)/python benchmarks/bytes.py

.venv/installed: setup.py pyproject.toml
ifeq ($(HAS_TORCH),yes)
	$(PYTHON) -m venv --system-site-packages .venv
else
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
endif
	$(BIN)/pip install --quiet -e ".[test,ecosystem,docs]"
	touch $@

clean:
	rm -rf .venv out build *.egg-info
