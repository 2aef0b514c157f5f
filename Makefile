# Needs make and Python 3.11 or newer; everything else is installed into folders named .venv*.
# `make help` lists the targets.

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-hosts test test-latest test-slow test-latest-slow lint format typecheck gpu-check gpu-test tpu-check tpu-test bench clean clean-venvs

# The first Python that really runs, is new enough and can make environments. A name on PATH is not
# enough: version managers leave stand-ins there that only print an error. 3.11 comes first because
# every dependency has wheels for it. Another one: make PYTHON=/path/to/python3.13 ...
PYTHON_CHECK := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3; do \
	if $$candidate -c '$(PYTHON_CHECK)' >/dev/null 2>&1; then command -v $$candidate; break; fi; done)

RUNTIME ?= jax
DEMO_ARGS ?=
BENCHMARKS ?= translate dispatch annotate step
JOBS ?= 2
PYTEST_ARGS ?=
# More options for pip, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu", which
# takes PyTorch's small CPU build instead of the CUDA build that Linux gets otherwise.
PIP_ARGS ?=

MAIN_VENV := .venv
LATEST_VENV := .venv-latest
GPU_VENV := .venv-gpu
TPU_VENV := .venv-tpu
TORCHAX_VENV := .venv-torchax
DEMO_VENV := .venv-demo-$(RUNTIME)

# The two environments that are tested. torch 2.9 is the last one that torch_xla supports.
MAIN_PACKAGES := -e ".[jax,torch-xla,preflight,dev]"
LATEST_PACKAGES := -e ".[jax,dev]" "torch==2.15.*" "spmd_types==0.2.3" "tyro==1.0.*"
# torchtitan's Llama code is tested as it is published. To import it takes spmd_types and tyro; what
# else torchtitan requires (data sets, loaders, loggers) is its trainer's, and large.
LATEST_PACKAGES_ALONE := "torchtitan==0.3.0"
DEMO_PACKAGES_jax := -e ".[jax]" "torch>=2.13,<2.14" tqdm
DEMO_PACKAGES_torch_xla := -e ".[torch-xla]" tqdm
# torch 2.9 is built for CUDA 12, torch 2.13 for CUDA 13: one CUDA version per environment.
CUDA ?= 13
GPU_PACKAGES_12 := -e ".[cuda12,dev]" "torch==2.9.*"
GPU_PACKAGES_13 := -e ".[cuda13,dev]" "torch>=2.13,<2.14"
# What benchmarks.step is compared with. torchax asks for neither flax nor optax, and needs both.
TORCHAX_PACKAGES := -e ".[jax]" "torch==2.9.*" torchax==0.0.13 flax optax
TPU_PACKAGES := -e ".[tpu]" "torch>=2.13,<2.14"

# An environment is up to date when its stamp is newer than what says what belongs into it.
STAMP := .installed
STAMP_NEEDS := setup.cfg pyproject.toml Makefile

# $(call install,FOLDER,PACKAGES,ALONE): makes the environment, says how much is downloaded, installs
# PACKAGES, then ALONE without what they require.
define install
	@$(PYTHON) -c '$(PYTHON_CHECK)' 2>/dev/null || { echo "Python 3.11 or newer, with venv, is \
	needed. '$(PYTHON)' is not that. Pass one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "$(1): preparing it with $$($(PYTHON) -V), $(PYTHON)"
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install -qq "pip>=26"
	@$(1)/bin/python tools/download_size.py $(PIP_ARGS) $(2)
	@echo "$(1): installing (a few minutes the first time)"
	@start=$$(date +%s); $(1)/bin/python -m pip install -qq $(PIP_ARGS) $(2) \
	$(if $(3),&& $(1)/bin/python -m pip install -qq --no-deps $(PIP_ARGS) $(3)) \
	&& echo "$(1): ready after $$(( $$(date +%s) - start )) s"
	@touch $(1)/$(STAMP)
endef

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(MAIN_VENV)/$(STAMP)  ## make .venv: both runtimes, torch 2.9, development tools
	@echo "$(MAIN_VENV) is ready: . $(MAIN_VENV)/bin/activate"

demo: $(DEMO_VENV)/$(STAMP)  ## run the demo; RUNTIME=jax (default) or torch_xla, only that one is installed
	$(DEMO_VENV)/bin/python -m examples.train_lm --runtime $(RUNTIME) $(DEMO_ARGS)

demo-hosts: .venv-demo-jax/$(STAMP)  ## kill a job of 4 processes, and see it go on as 2 on another mesh
	.venv-demo-jax/bin/python -m examples.train_job_demo $(DEMO_ARGS)

# A process runs one runtime: everything is tested with jax, what uses a runtime with torch_xla too.
test: $(MAIN_VENV)/$(STAMP)  ## run the tests on torch 2.9, with jax and with torch_xla
	$(MAIN_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow and not gpu" --runtime jax $(PYTEST_ARGS)
	$(MAIN_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "on_runtime and not slow and not gpu" \
	--runtime torch_xla $(PYTEST_ARGS) || [ $$? -eq 5 ]

# What imports no torch was tested by `make test`; another torch changes nothing for it, nor for what
# several processes tell each other (one file of those stays, the checkpoints'). The programs of the
# README and of examples/ have environments of their own.
WITHOUT_TORCH := tests/mesh_utils/test_[acgjlmnopstx]* tests/mesh_utils/test_drawing* \
	tests/tpu_configs tests/xla_dtensor/report tests/benchmarks/test_[blmp]* \
	tests/xla_dtensor/cli tests/xla_dtensor/doctor tests/xla_dtensor/quick tests/xla_dtensor/core \
	tests/examples tests/tools tests/torch_xla_matrix tests/test_readme.py \
	tests/xla_dtensor/*/test_*hosts.py tests/xla_dtensor/checkpoint/test_kill.py \
	tests/xla_dtensor/test_process* tests/xla_dtensor/test_program_check.py \
	tests/xla_dtensor/runtimes/test_same_program.py tests/xla_dtensor/runtimes/test_*processes* \
	tests/xla_dtensor/runtimes/test_starting.py tests/xla_dtensor/runtimes/test_jax_lanes.py \
	tests/xla_dtensor/runtimes/test_jax_stacks.py tests/xla_dtensor/runtimes/test_jax_counted.py \
	tests/xla_dtensor/runtimes/test_jax_rehome.py tests/xla_dtensor/test_live_* \
	tests/xla_dtensor/runtimes/test_jax_sources.py
# How single ops are lowered, and what they communicate: another torch seldom changes it, so these are
# with the slow tests there. The file of the ops that everybody uses stays.
OF_SINGLE_OPS := tests/xla_dtensor/runtimes/test_jax_lowering_* \
	tests/xla_dtensor/runtimes/test_lean_attention.py tests/xla_dtensor/runtimes/test_jax_manual* \
	tests/xla_dtensor/runtimes/test_whole_* tests/xla_dtensor/runtimes/test_op_corrections.py \
	tests/xla_dtensor/runtimes/test_jax_product_order.py tests/xla_dtensor/test_product_order.py \
	tests/xla_dtensor/test_collectives.py tests/xla_dtensor/test_random.py \
	tests/xla_dtensor/spmd/test_spmd_scripts.py
test-latest: $(LATEST_VENV)/$(STAMP)  ## run the tests on the newest supported torch, with jax
	$(LATEST_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow and not gpu" \
	$(patsubst %,--ignore-glob='$(CURDIR)/%',$(WITHOUT_TORCH) $(OF_SINGLE_OPS)) $(PYTEST_ARGS)

test-latest-slow: $(LATEST_VENV)/$(STAMP)  ## run the tests that `make test-latest` leaves out
	$(LATEST_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "not gpu" \
	$(wildcard $(OF_SINGLE_OPS)) $(PYTEST_ARGS)
	$(LATEST_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "slow and not gpu" \
	$(patsubst %,--ignore-glob='$(CURDIR)/%',$(WITHOUT_TORCH) $(OF_SINGLE_OPS)) $(PYTEST_ARGS)

# pytest exits with 5 when it finds no test, which is no failure for a subset.
test-slow: $(MAIN_VENV)/$(STAMP)  ## run the tests that `make test` leaves out
	$(MAIN_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "slow and not gpu" --runtime jax \
	$(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(MAIN_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "on_runtime and slow and not gpu" \
	--runtime torch_xla $(PYTEST_ARGS) || [ $$? -eq 5 ]

lint: $(MAIN_VENV)/$(STAMP)  ## check style, format and spelling
	$(MAIN_VENV)/bin/ruff check
	$(MAIN_VENV)/bin/ruff format --check
	$(MAIN_VENV)/bin/codespell

format: $(MAIN_VENV)/$(STAMP)  ## format the code and fix what can be fixed
	$(MAIN_VENV)/bin/ruff check --fix
	$(MAIN_VENV)/bin/ruff format

typecheck: $(MAIN_VENV)/$(STAMP)  ## check the types
	$(MAIN_VENV)/bin/pyright --pythonpath $(MAIN_VENV)/bin/python

gpu-check:  ## the tests and the steps of benchmarks.step on this GPU; GPU_PYTHON=... uses an environment you have
	@if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then $(MAKE) --no-print-directory gpu-test; \
	else echo "gpu-check: skipped, this machine has no NVIDIA GPU"; fi

ifdef GPU_PYTHON
gpu-test:
else
GPU_PYTHON := $(GPU_VENV)$(CUDA)/bin/python
gpu-test: $(GPU_VENV)$(CUDA)/$(STAMP)
endif
	$(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)
	$(GPU_PYTHON) -m benchmarks.step --on-device gpu

# Whether there is a TPU is told without libtpu, which looks for one for minutes, and without JAX.
tpu-check:  ## the steps of benchmarks.step on this machine's TPUs; TPU_PYTHON=... uses an environment you have
	@if reason=$$($(PYTHON) -m benchmarks.step_devices tpu); then $(MAKE) --no-print-directory tpu-test; \
	else echo "tpu-check: skipped, $$reason"; fi

ifdef TPU_PYTHON
tpu-test:
else
TPU_PYTHON := $(TPU_VENV)/bin/python
tpu-test: $(TPU_VENV)/$(STAMP)
endif
	$(TPU_PYTHON) -m benchmarks.step --on-device tpu

bench: $(MAIN_VENV)/$(STAMP) $(TORCHAX_VENV)/$(STAMP)  ## run the benchmarks; BENCHMARKS="translate ..." names some
	@set -e; for name in $(BENCHMARKS); do \
	echo "== benchmarks.$$name"; $(MAIN_VENV)/bin/python -m benchmarks.$$name; done

clean:  ## remove caches and build outputs; environments stay
	rm -rf build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis .test-programs
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

clean-venvs:  ## remove the environments
	rm -rf $(MAIN_VENV) $(LATEST_VENV) $(GPU_VENV)12 $(GPU_VENV)13 $(TPU_VENV) $(TORCHAX_VENV) .venv-demo-jax .venv-demo-torch_xla

$(MAIN_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(call install,$(MAIN_VENV),$(MAIN_PACKAGES))

$(LATEST_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(call install,$(LATEST_VENV),$(LATEST_PACKAGES),$(LATEST_PACKAGES_ALONE))

$(TORCHAX_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(call install,$(TORCHAX_VENV),$(TORCHAX_PACKAGES))

$(GPU_VENV)12/$(STAMP): $(STAMP_NEEDS)
	$(call install,$(GPU_VENV)12,$(GPU_PACKAGES_12))

$(GPU_VENV)13/$(STAMP): $(STAMP_NEEDS)
	$(call install,$(GPU_VENV)13,$(GPU_PACKAGES_13))

$(TPU_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(call install,$(TPU_VENV),$(TPU_PACKAGES))

.venv-demo-jax/$(STAMP): $(STAMP_NEEDS)
	$(call install,.venv-demo-jax,$(DEMO_PACKAGES_jax))

.venv-demo-torch_xla/$(STAMP): $(STAMP_NEEDS)
	$(call install,.venv-demo-torch_xla,$(DEMO_PACKAGES_torch_xla))

.venv-demo-%/$(STAMP):
	@echo "RUNTIME=$* is not known. Pass RUNTIME=jax or RUNTIME=torch_xla." >&2; exit 1
