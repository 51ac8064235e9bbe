# Set-up and everyday commands; `make` alone lists them. Each makes the environment it needs, once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Where a shell sets it, each of the tests' thousand processes would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
ARGS ?=
SLOWEST := --durations 20 --durations-min 1

BIN := .venv/bin
BENCH_BIN := .venv-bench/bin
ADAPTERS_BIN := .venv-adapters/bin
DOCS_BIN := .venv-docs/bin
PINS := pyproject.toml envs/constraints.txt
NEXT_DEBIANS := trixie forky
SCRIPT_DIRS := $(wildcard .ci benchmarks containers docs envs examples sbatch_templates tests)

# Two `make`s in one directory (a demo beside the tests) wait for each other: pip damages an environment that two of them
# write. The lock is on this file, so that none is left over. Systems without flock (macOS) and file systems without locks
# (some Lustre) go without.
can-lock = flock --shared --nonblock --conflict-exit-code 0 Makefile true 2>/dev/null && echo yes
one-at-a-time := $(if $(shell $(can-lock)),flock Makefile)
# Installs what the rule's environment $(1) needs, with the flags $(2), unless a `make` beside this one has done it meanwhile.
# Quiet but for errors.
pip-install = $(one-at-a-time) sh -c '{ [ -e $@ ] && [ -z "$$(find $^ -newer $@)" ]; } \
	|| { $(1)/python -m pip install -qq --disable-pip-version-check $(2) -c envs/constraints.txt "$$@" && touch $@; }' pip

.PHONY: help demo test test-long test-adapters test-all check format dist docs pictures bench campaign campaign-slurm \
	campaign-strangers campaign-storm campaign-pythons campaign-dockerfile clean distclean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  ARGS="..." adds to the command that runs: make test ARGS="-k resume", make bench ARGS="--help"'
	@echo '  PYTHON=... names the Python (3.10 or newer) to make environments with'

demo: .venv/.runtime ## Train on real digits on this machine: the quickest look
	@$(BIN)/ddp-hpc submit examples/digits.yaml name=demo --follow $(ARGS)
	@echo '(`ddp-hpc` is in .venv/bin: `source .venv/bin/activate` puts it on PATH)'

test: .venv/.dev ## The tests in random order, those on the Slurm cluster beside the others
	@echo 'The tests take 6 to 8 minutes on 2 cores ...'
	$(BIN)/python -m pytest -n 4 $(SLOWEST) $(ARGS) # many tests wait for a process that starts: four keep two cores busy

test-long: .venv/.dev ## The tests that `make test` leaves out because they take long
	$(BIN)/python -m pytest -n 2 $(SLOWEST) -m 'long and not campaign' $(ARGS)

test-adapters: .venv-adapters/.tools ## The examples with Lightning, Transformers, Accelerate, Optuna and Hydra, and the recorders W&B and MLflow, killed and resumed
	$(ADAPTERS_BIN)/python -m pytest -o addopts=-ra $(SLOWEST) tests/adapters $(ARGS)

test-all: check test test-long test-adapters ## All checks and tests, then those on Slurm again with the Slurm of each next Debian (as root), and on older PyTorches
	for suite in $(NEXT_DEBIANS); do \
		tests/slurm/lab/make-rootfs .slurm-lab/rootfs/$$suite $$suite; \
		$(BIN)/python -m tests.campaigns.other_slurm .slurm-lab/rootfs/$$suite $(ARGS); \
	done
	$(BIN)/python -m tests.campaigns.pythons 3.11+torch2.6 3.12+torch2.9 3.12

check: .venv/.dev ## Format, lint, types, import contracts, shell scripts, Dockerfile
	$(BIN)/ruff format --check --diff
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	find $(SCRIPT_DIRS) -type f ! -name '*.j2' -exec awk 'FNR == 1 && /^#!.*sh( |$$)/ { print FILENAME } { nextfile }' {} + \
		| xargs -r $(BIN)/shellcheck
	$(BIN)/hadolint containers/Dockerfile

format: .venv/.dev ## Rewrite the code the way `check` wants it, where that is safe
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

dist: .venv/.dev ## Build wheel and sdist into dist/, twice, and compare them to the byte
	envs/make-dist $(BIN)/python dist

docs: .venv-docs/.tools ## Build the site from docs/ into site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build $(ARGS) # without --quiet, which hides warnings from strict mode, too
	@echo 'Open site/index.html. The search needs a server: $(DOCS_BIN)/python -m http.server --bind 127.0.0.1 --directory site'

pictures: .venv-docs/.tools .venv/.runtime ## Draw docs/pictures again: the architecture, and a run that is recorded (as root)
	docs/tools/draw $(DOCS_BIN)
	docs/tools/record-run $(BIN) $(DOCS_BIN)

bench: .venv-bench/.runtime ## Measure ours and its peers side by side
	$(BENCH_BIN)/python benchmarks/run.py $(ARGS)

campaign: .venv/.dev ## Hundreds of killed and resumed runs
	$(BIN)/python -m pytest -m campaign -s --ignore=tests/slurm $(ARGS)

campaign-slurm: .venv/.dev ## Every fault by every launcher on the test cluster, then thirty in a row (as root, an hour)
	$(BIN)/python -m pytest -m campaign -s -p no:randomly tests/slurm $(ARGS)

campaign-strangers: .venv/.dev ## Another user attacks runs of each launcher on the test cluster (as root, 20 minutes)
	$(BIN)/python -m pytest -m 'campaign or not campaign' -s -p no:randomly tests/slurm/test_strangers.py $(ARGS)

campaign-storm: .venv/.dev ## Several runs at once under random faults, a seed each: ARGS="--seed 1 2 3 --minutes 8 --runs 3" (as root)
	$(BIN)/python -m tests.slurm.storm $(ARGS)

campaign-pythons: .venv/.dev ## Every Python that we support, or ARGS="3.11+torch2.6", in an environment of its own (6 GB each, removed afterwards)
	$(BIN)/python -m tests.campaigns.pythons $(ARGS)

campaign-dockerfile: .venv/.dev ## A real build of containers/Dockerfile by Debian's buildah (as root, 20 GB meanwhile)
	$(BIN)/python -m tests.campaigns.dockerfile $(ARGS)

clean: ## Remove caches and build outputs; runs/ and environments stay
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find ddp_hpc tests benchmarks examples envs -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove the environments and Slurm's files too
	rm -rf .venv .venv-adapters .venv-bench .venv-docs .slurm-lab

# Environments. A stamp inside each says how far it has come; it is touched last, so an interrupted one goes on.

%/.made:
	@$(one-at-a-time) envs/make-venv $* $(PYTHON)
	@touch $@

.venv/.runtime: $(PINS) | .venv/.made
	@echo 'Installing ddp_hpc and PyTorch into .venv (about 60 s, 5 GB, once) ...'
	@$(call pip-install,$(BIN),--no-compile) -e '.[vision]' # a demo needs few of 10,000 modules compiled

.venv/.dev: $(PINS) | .venv/.runtime
	@echo 'Installing the tools for tests and checks into .venv (about 60 s, once) ...'
	@$(call pip-install,$(BIN),--no-compile) -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true # at once, on all cores; some files are templates

.venv-bench/.runtime: $(PINS) envs/bench.txt | .venv-bench/.made
	@echo 'Installing ddp_hpc, PyTorch, Lightning and Accelerate into .venv-bench (about 2 min, once) ...'
	@$(call pip-install,$(BENCH_BIN)) -e '.[vision]' -r envs/bench.txt

.venv-adapters/.tools: $(PINS) envs/bench.txt envs/adapters.txt | .venv-adapters/.made
	@echo 'Installing ddp_hpc, PyTorch, Lightning, Transformers, Accelerate, Optuna, Hydra, W&B and MLflow into .venv-adapters (about 3 min, once) ...'
	@$(call pip-install,$(ADAPTERS_BIN)) -e '.[vision]' -r envs/adapters.txt

.venv-docs/.tools: envs/docs.txt envs/constraints.txt | .venv-docs/.made
	@echo 'Installing MkDocs, D2 and pyte into .venv-docs (about 20 s, once) ...'
	@$(call pip-install,$(DOCS_BIN)) -r envs/docs.txt
