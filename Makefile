# make demo | study-quick | test | lint | setup: each sets up $(VENV) first, and reuses it while requirements/ stays the same.
# make real: trains SmolLM2-135M-Instruct on two tasks of reasoning-gym, four runs of at most an hour each on two cores, and writes docs/real_model.md.
# make test-all: all tests, including every combination of layouts, several machines, Slurm, mutants of the package, injected faults, and as root the network tests; an hour or more.
# make network-tests: failure tests across 2 and 3 network namespaces; needs root.
# make chaos: faults by seed, and the invariants afterwards: component histories, and real runs whose processes, files and disks fail; MAR_CHAOS_HISTORIES, MAR_CHAOS_FAULTS, MAR_CHAOS_SEED, MAR_CHAOS_MINUTES.
# make gpu-tests: tests on a CUDA device, with $(VENV) if it exists and otherwise with the packages on PYTHONPATH.
# make loader-test: Transformer Engine's wheels (190 MB, from the package index) load into torch's process with one cuDNN; needs root.
# make durations: the tests; afterwards it writes the seconds of each file to tests/durations.json, so that workers take long files first.
# Works from any folder: make -C CHECKOUT demo, or make -f ../Makefile demo.
# VENV=DIR selects another folder for the environment; PYTHON=... selects the interpreter, a Python 3.12.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

ROOT := $(shell dirname "$$(realpath "$(strip $(MAKEFILE_LIST))")")
VENV ?= .venv
export VENV
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo study-quick real test test-all durations gpu-tests network-tests chaos loader-test lint bench-setup

help:
	@sed -n '1,10s/^# //p' "$(ROOT)/Makefile"

setup:
	@"$(ROOT)/launchers/setup.sh"

demo: setup
	@cd "$(ROOT)"
	"$$VENV/bin/python" examples/arithmetic/prepare.py
	launchers/local.sh examples/arithmetic_sft_cpu.yaml
	launchers/local.sh examples/arithmetic_cpu.yaml

study-quick: setup
	@cd "$(ROOT)"
	export PATH="$$(realpath "$$VENV")/bin:$$PATH"
	here=examples/stability results=runs/stability/quick
	python "$$here/prepare.py"
	mar study "$$here/warm.yaml" --only chain
	mar study "$$here/quick.yaml" --jobs 2
	python "$$here/results.py" collect "$$here/quick.yaml" --out "$$results"
	python "$$here/results.py" show "$$results"
	mar report "$$results"/*/
	cat "$$results/tables.md"

real: setup
	@cd "$(ROOT)"
	"$$VENV/bin/python" examples/smollm2/real.py

test: setup
	@cd "$(ROOT)"
	"$$VENV/bin/python" -m pytest --numprocesses=3 --durations=15

test-all: setup
	@cd "$(ROOT)"
	export MAR_TESTS=all
	"$$VENV/bin/python" -m pytest --numprocesses=3 --durations=30
	"$$VENV/bin/python" -m tests.mutation.run
	$(MAKE) -f "$(ROOT)/Makefile" chaos
	[[ "$$(id -u)" != 0 ]] || "$$VENV/bin/python" -m pytest tests/network
	[[ "$$(id -u)" != 0 ]] || $(MAKE) -f "$(ROOT)/Makefile" loader-test

durations: setup
	@cd "$(ROOT)"
	"$$VENV/bin/python" -m pytest --numprocesses=3 --record-durations

gpu-tests:
	@cd "$(ROOT)"
	python="$$VENV/bin/python"
	[[ -x "$$python" ]] || python="$${PYTHON:-python3}"
	# Without the other tests' conftest and pytest plug-ins, which a bare host may lack.
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$$python" -m pytest tests/gpu --record --confcutdir=tests/gpu \
	  -p no:cacheprovider -o addopts="--strict-markers --import-mode=importlib -ra"

network-tests: setup
	@cd "$(ROOT)"
	"$$VENV/bin/python" -m pytest tests/network

chaos: setup
	@cd "$(ROOT)"
	"$$VENV/bin/python" -m tests.chaos.run

loader-test: setup
	@cd "$(ROOT)"
	wheels="$$(realpath "$$VENV")/te-wheels"
	grep -E '^transformer-engine' requirements/gpu.txt > "$$VENV/te-wheels.txt"
	"$$VENV/bin/python" -m pip download --quiet --no-deps --dest "$$wheels" -r "$$VENV/te-wheels.txt"
	MAR_TE_WHEELS="$$wheels" "$$VENV/bin/python" -m pytest tests/unit/test_libraries.py

bench-setup: setup
	@cd "$(ROOT)"
	"$$VENV/bin/python" -m pip install --no-deps --progress-bar off -r requirements/bench.txt

lint: setup
	@cd "$(ROOT)"
	"$$VENV/bin/ruff" check .
	"$$VENV/bin/ruff" format --check .
	"$$VENV/bin/mypy"
	"$$VENV/bin/lint-imports"
	"$$VENV/bin/python" lint/style.py
	"$$VENV/bin/shellcheck" launchers/*.sh launchers/slurm/* examples/recipes/run.sh .ci/run
	"$$VENV/bin/hadolint" Dockerfile Dockerfile.cpu
	NO_MKDOCS_2_WARNING=1 "$$VENV/bin/mkdocs" build --quiet -f site/mkdocs.yml
