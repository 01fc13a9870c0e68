# Every target works from a clean checkout: what it needs is installed into .venv first.
PYTHON ?= python3
# The version that tests run with.  TORCH="torch==... --index-url ..." chooses another build.
TORCH  ?= torch==2.13.0
# Where the base Python already has torch (a GPU image, say), the venv borrows it instead of installing one.
HAS_TORCH := $(shell $(PYTHON) -c "import torch" 2>/dev/null && echo yes)
# On Linux, PyPI's torch is the build for CUDA: gigabytes that a machine without a GPU cannot use.
CPU_TORCH := https://download.pytorch.org/whl/cpu
REACHES_CPU_TORCH := $(PYTHON) -c "import urllib.request as r; r.urlopen('$(CPU_TORCH)/torch/', timeout=5)" 2>/dev/null
TRITON ?= triton==3.6.0
BIN := .venv/bin
# Test processes, which take files in order: those that start ranks of their own, the slow ones, come first.
WORKERS ?= 2

.PHONY: demo verify test test-all lint docs bench clean

demo: .venv/cli
	$(BIN)/flatfsdp demo

# All precisions and switches, and more ways to share a model: some minutes on 2 CPU cores.
verify: .venv/cli
	$(BIN)/flatfsdp verify --steps 6 --out out/verify
	$(BIN)/flatfsdp verify --matrix --ranks 4 --only "pp 2 x tp 2 + SP," --out out/verify

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

# The package and its command line.  If the index for CPUs cannot be reached, torch comes from PyPI.
.venv/cli: setup.py pyproject.toml
ifeq ($(HAS_TORCH),yes)
	$(PYTHON) -m venv --system-site-packages .venv
else
	$(PYTHON) -m venv .venv
	@if command -v nvidia-smi >/dev/null || ! $(REACHES_CPU_TORCH); then index=; \
	else index="--extra-index-url $(CPU_TORCH)"; fi; \
	set -x; $(BIN)/pip install $(TORCH) $$index
endif
	$(BIN)/pip install -e ".[cli]"
	touch $@

# Everything else that tests and docs need.  torch for CUDA brings triton; without a GPU it interprets and
# compiles kernels in tests.
.venv/installed: .venv/cli
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/pip install $(TRITON)
	$(BIN)/pip install -e ".[test,ecosystem,docs]"
	touch $@

clean:
	rm -rf .venv out build *.egg-info
