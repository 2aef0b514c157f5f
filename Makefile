# Needs make and Python 3.11 or newer; everything else is installed into folders named .venv*.
# `make help` lists the targets.

.DEFAULT_GOAL := help
.PHONY: help setup docs demo demo-hosts test test-torch-xla test-all test-newest fuzz lint format typecheck gpu-check gpu-test \
	tpu-check tpu-test bench clean clean-venvs

# The Python to make environments with; without it the newest or oldest one that runs is looked for.
PYTHON ?=
export PYTHON PIP_ARGS

RUNTIME ?= jax
DEMO_ARGS ?=
BENCHMARKS ?= translate dispatch annotate step
JOBS ?= 2
# Tests that share the GPUs at a time: each compiles on several cores.
GPU_JOBS ?= 4
PYTEST_ARGS ?=
TEST_ALL_ARGS ?=
FUZZ_ARGS ?=
# More options for pip, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu", which
# takes PyTorch's small CPU build instead of the CUDA build that Linux gets otherwise.
PIP_ARGS ?=

# Environments. Behind each: whether its Python is the newest or the oldest that this machine has, of
# which minor versions of Python 3, then what is installed. An environment is made again when its
# stamp is older than what says what belongs into it.
STAMP := .installed
STAMP_NEEDS := setup.cfg pyproject.toml Makefile tools/make_environment.sh
make_environment = @tools/make_environment.sh

# The newest torch and JAX that are supported; on Python 3.11 that JAX is 0.10. torchtitan's Llama code
# is tested as it is published. To import it takes spmd_types and tyro; its trainer takes torchdata and
# tensorboard besides, which stand among the clients.
# The trainers of xla_dtensor.integrations are tested at these versions; what comes next, by test-newest.
CLIENTS := accelerate==1.15.* datasets==5.2.* lightning==2.6.* peft==0.21.* tensorboard==2.21.* \
	torchao==0.18.* torchdata==0.11.* torchmetrics==1.9.* trl==1.16.*
MAIN_VENV := .venv
MAIN := newest 11 14 -e .[jax,preflight,dev] torch==2.15.* spmd_types==0.2.3 tyro==1.0.* $(CLIENTS) \
	--alone torchtitan==0.3.0
# The frozen runtime, and the oldest stack: torch 2.9 is the last one that torch_xla supports.
TORCH_XLA_VENV := .venv-torch-xla
TORCH_XLA := oldest 11 13 -e .[jax,torch-xla,preflight,dev] jax==0.10.*
# Whatever the index has, without the bounds of setup.cfg. --alone: ours would hold it back.
NEWEST_VENV := .venv-newest
NEWEST := newest 11 14 Jinja2 jsonschema numpy PyYAML typeguard torch jax[tpu] codespell expecttest hypothesis pytest \
	pytest-xdist rich tqdm transformers absl-py orbax-checkpoint flatbuffers spmd_types tyro \
	$(foreach client,$(CLIENTS),$(firstword $(subst ==, ,$(client)))) --alone torchtitan -e .
# A pair of torch and JAX, for parts of test-all: make environment-STACK STACK=2.13,0.11.0
STACK ?= 2.13,0.11.0
comma := ,
STACK_VENV := .venv-stack-$(subst $(comma),-,$(STACK))
STACK_PACKAGES := newest 12 13 -e .[jax,dev] torch==$(word 1,$(subst $(comma), ,$(STACK))).* \
	jax==$(word 2,$(subst $(comma), ,$(STACK)))
DEMO_VENV := .venv-demo-$(RUNTIME)
DEMO_jax := newest 11 14 -e .[jax] torch==2.15.* tqdm absl-py
DEMO_torch_xla := oldest 11 13 -e .[torch-xla] tqdm
# torch 2.9 is built for CUDA 12, torch 2.13 and newer for CUDA 13: one CUDA version per environment.
CUDA ?= 13
GPU_VENV := .venv-gpu$(CUDA)
GPU_12 := newest 11 13 -e .[cuda12,dev] torch==2.9.*
GPU_13 := newest 11 14 -e .[cuda13,dev] torch==2.15.*
DOCS_VENV := .venv-docs
DOCS := newest 11 14 -e .[docs]
TPU_VENV := .venv-tpu
TPU := newest 11 14 -e .[tpu] torch==2.15.*
# What benchmarks.step is compared with. torchax asks for neither flax nor optax, and needs both.
TORCHAX_VENV := .venv-torchax
TORCHAX := oldest 11 13 -e .[jax] torch==2.9.* torchax==0.0.13 flax optax

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: environment-MAIN  ## make .venv: JAX, the newest torch, libtpu's compiler, development tools
	@echo "$(MAIN_VENV) is ready: . $(MAIN_VENV)/bin/activate"

# `make environment-MAIN` makes $(MAIN_VENV), `make folder-MAIN` prints its name.
environment-%:
	@$(MAKE) --no-print-directory $($*_VENV)/$(STAMP)
	@$($*_VENV)/bin/python tools/show_environment.py $($*_VENV)
folder-%:
	@echo $($*_VENV)

demo: $(DEMO_VENV)/$(STAMP)  ## run the demo; RUNTIME=jax (default) or torch_xla, only that one is installed
	$(DEMO_VENV)/bin/python -m examples.train_lm --runtime $(RUNTIME) $(DEMO_ARGS)

demo-hosts: .venv-demo-jax/$(STAMP)  ## kill a job of 4 processes, and see it go on as 2 on another mesh
	.venv-demo-jax/bin/python -m examples.train_job_demo $(DEMO_ARGS)

# The contract says what users may rely on, by the public API. What it leaves out has the marker
# `thorough`, set in a test or by what its file imports (tests/contract.py).
#
# A worker that has crashed is not replaced: pytest-xdist's groups wait for it for ever.
PYTEST := -m pytest -n $(JOBS) --dist loadgroup --max-worker-restart=0
CONTRACT := not thorough and not gpu
docs: environment-DOCS  ## build the site into out/site; dead links and docstrings that cannot be read fail
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict

test: environment-MAIN  ## the contract: what a change has to pass, in 10 to 20 minutes on two cores
	$(MAIN_VENV)/bin/python $(PYTEST) -m "$(CONTRACT)" $(PYTEST_ARGS)
	@$(MAIN_VENV)/bin/python tools/show_environment.py $(MAIN_VENV)

test-torch-xla: environment-TORCH_XLA  ## the contract of the torch_xla runtime, on torch 2.9
	$(TORCH_XLA_VENV)/bin/python $(PYTEST) -m "on_runtime and $(CONTRACT)" --runtime torch_xla $(PYTEST_ARGS)

test-all:  ## all tests, on all stacks, in parts; goes on where it was stopped. Takes hours
	@tools/test_all.py $(TEST_ALL_ARGS)

# Draws programs that were not drawn before: their seeds begin at the clock.
SECONDS ?= 600
fuzz: environment-MAIN  ## judge new random programs on the JAX runtime; SECONDS=600
	$(MAIN_VENV)/bin/python -m tests.drawn.run --programs new --seconds $(SECONDS) $(FUZZ_ARGS)

# Its outcome says what the next release of torch or JAX breaks; it is nobody's verdict.
test-newest: environment-NEWEST  ## the contract and the trainers on whatever is newest: torch, JAX and clients
	XLA_DTENSOR_ANY_JAX=1 $(NEWEST_VENV)/bin/python $(PYTEST) -m "$(CONTRACT)" $(PYTEST_ARGS)
	XLA_DTENSOR_ANY_JAX=1 $(NEWEST_VENV)/bin/python $(PYTEST) tests/xla_dtensor/integrations $(PYTEST_ARGS)

lint: $(MAIN_VENV)/$(STAMP)  ## check style, format and spelling
	$(MAIN_VENV)/bin/ruff check
	$(MAIN_VENV)/bin/ruff format --check
	$(MAIN_VENV)/bin/codespell

format: $(MAIN_VENV)/$(STAMP)  ## format the code and fix what can be fixed
	$(MAIN_VENV)/bin/ruff check --fix
	$(MAIN_VENV)/bin/ruff format

# Each runtime's files are checked where the runtime is installed.
typecheck: $(MAIN_VENV)/$(STAMP) $(TORCH_XLA_VENV)/$(STAMP)  ## check the types
	$(MAIN_VENV)/bin/pyright --pythonpath $(MAIN_VENV)/bin/python
	$(MAIN_VENV)/bin/pyright --project tools/pyright_torch_xla.json --pythonpath $(TORCH_XLA_VENV)/bin/python

gpu-check:  ## the tests and the steps of benchmarks.step on this GPU; GPU_PYTHON=... uses an environment you have
	@if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then $(MAKE) --no-print-directory gpu-test; \
	else echo "gpu-check: skipped, this machine has no NVIDIA GPU"; fi

ifdef GPU_PYTHON
gpu-test:
else
GPU_PYTHON := $(GPU_VENV)/bin/python
gpu-test: $(GPU_VENV)/$(STAMP)
endif
	$(GPU_PYTHON) -m pytest -m gpu -n $(GPU_JOBS) $(PYTEST_ARGS)
	$(GPU_PYTHON) -m benchmarks.step --on-device gpu

# Whether there is a TPU is told without libtpu, which looks for one for minutes, and without JAX.
tpu-check:  ## the steps of benchmarks.step on this machine's TPUs; TPU_PYTHON=... uses an environment you have
	@python=$(PYTHON); : $${python:=$$(tools/find_python.sh newest 11 14)}; \
	if reason=$$($$python -m benchmarks.step_devices tpu); then $(MAKE) --no-print-directory tpu-test; \
	else echo "tpu-check: skipped, $$reason"; fi

ifdef TPU_PYTHON
tpu-test:
else
TPU_PYTHON := $(TPU_VENV)/bin/python
tpu-test: $(TPU_VENV)/$(STAMP)
endif
	$(TPU_PYTHON) -m benchmarks.step --on-device tpu

bench: $(MAIN_VENV)/$(STAMP) $(TORCH_XLA_VENV)/$(STAMP) $(TORCHAX_VENV)/$(STAMP)  ## run the benchmarks; BENCHMARKS="translate ..." names some
	@set -e; for name in $(BENCHMARKS); do \
	echo "== benchmarks.$$name"; $(MAIN_VENV)/bin/python -m benchmarks.$$name; done

clean:  ## remove caches and build outputs; environments stay
	rm -rf build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis .test-all
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

clean-venvs:  ## remove the environments
	rm -rf $(MAIN_VENV) $(TORCH_XLA_VENV) $(NEWEST_VENV) .venv-stack-* .venv-gpu* $(TPU_VENV) $(TORCHAX_VENV) $(DOCS_VENV) .venv-demo-*

$(MAIN_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(make_environment) $(MAIN_VENV) $(MAIN)

$(TORCH_XLA_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(make_environment) $(TORCH_XLA_VENV) $(TORCH_XLA)

$(NEWEST_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(make_environment) $(NEWEST_VENV) $(NEWEST)

$(STACK_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(make_environment) $(STACK_VENV) $(STACK_PACKAGES)

$(DOCS_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(make_environment) $(DOCS_VENV) $(DOCS)

$(TORCHAX_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(make_environment) $(TORCHAX_VENV) $(TORCHAX)

$(GPU_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(make_environment) $(GPU_VENV) $(GPU_$(CUDA))

$(TPU_VENV)/$(STAMP): $(STAMP_NEEDS)
	$(make_environment) $(TPU_VENV) $(TPU)

.venv-demo-jax/$(STAMP): $(STAMP_NEEDS)
	$(make_environment) .venv-demo-jax $(DEMO_jax)

.venv-demo-torch_xla/$(STAMP): $(STAMP_NEEDS)
	$(make_environment) .venv-demo-torch_xla $(DEMO_torch_xla)

.venv-demo-%/$(STAMP):
	@echo "RUNTIME=$* is not known. Pass RUNTIME=jax or RUNTIME=torch_xla." >&2; exit 1
