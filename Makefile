# kvrsim: everything runs in .venv, which the first target that needs it makes from $(PYTHON).

PYTHON ?= python3
WORKERS ?= logical
GPUS ?= 8
CTX ?= 16k

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
PINS := pyproject.toml constraints.txt
# Files with slow tests come first (tests/conftest.py); a process runs whole files, so fixtures of a file are made once.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help plan test test-all test-browser screenshots nightly fuzz check lint types imports fresh docs format results notebooks gpu models profiles fit engines clean

help: ## list these targets
	@echo "make TARGET   (PYTHON=$(PYTHON); any Python >= 3.11 will do)"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/  \1	\2/p' Makefile | expand -t 14

plan: $(VENV)/.core ## plan a prefill and print it (GPUS=8 CTX=16k)
	@$(BIN)/kvrsim plan --gpus $(GPUS) --ctx $(CTX)

test: $(VENV)/.dev ## the tests of the edit loop, without the slow ones (WORKERS=logical: one process per core, at most 8)
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.dev ## all tests, the slow ones too (what CI runs)
	$(PYTEST) --hypothesis-profile full

test-browser: $(VENV)/.dev ## drive every page in Chromium (apt install chromium chromium-driver); a missing browser fails
	KVRSIM_BROWSER=1 $(BIN)/python -m pytest tests/browser

screenshots: $(VENV)/.dev ## make the documentation's pictures again, of pages and others (HERE=PROFILE.json of this machine: that of confirm, too)
	$(BIN)/kvrsim simulate --strategy kvr-s --gpus 8 --ctx 16k --plot docs/images/plan.png >/dev/null
	$(BIN)/kvrsim simulate --strategy kvr-s --gpus 4 --ctx 11 --partition 5,3,2,1 --explain --plot docs/images/attention.png >/dev/null
	$(BIN)/kvrsim map --ctx 1k:32k:x2 --gpus 2,4,8 --link-bandwidths 10GB/s,300GB/s --plot docs/images/map.png >/dev/null
	$(BIN)/python -m tests.browser.screenshots $(if $(HERE),--here $(HERE))

nightly: $(VENV)/.dev ## all tests with new random examples, then the fuzzers for MINUTES=60 (SEED=N or a new one, printed)
	@seed=$(or $(SEED),$$($(BIN)/python -c 'import random; print(random.SystemRandom().randrange(2**31))')); \
	echo "make nightly SEED=$$seed"; \
	$(PYTEST) --hypothesis-profile nightly --hypothesis-seed $$seed --timeout 3600 && \
	    $(BIN)/python -m tests.laws.test_corpus $$seed 10 && \
	    $(BIN)/python tests/fuzz/fuzz_long.py --minutes $(or $(MINUTES),60) --seed $$seed

fuzz: $(VENV)/.dev ## random calls, commands and files for MINUTES=10, with SEED=N or a new one, which is printed (PAGE=FILE.md: a page of all cases so far)
	$(BIN)/python tests/fuzz/fuzz_long.py --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) $(if $(PAGE),--page $(PAGE))

check: lint types imports fresh ## ruff format, ruff, mypy, import-linter, and whether pages of results are stale

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

fresh: $(VENV)/.dev
	$(BIN)/python -m validate.results --check

docs: $(VENV)/.dev ## build the documentation into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.dev ## put the code in shape: ruff format, ruff --fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

INPUTS := TRACES SETTINGS CONFIGS PREFILLS VLLM SGLANG
results: $(VENV)/.dev ## write all pages of results again, in about 20 minutes on two idle cores (NAMES="accuracy speed": these)
	$(BIN)/python -m validate.results $(NAMES) $(foreach name,$(INPUTS),$(if $($(name)),$(name)="$($(name))"))

notebooks: $(VENV)/.dev ## run the notebooks and store what they show
	$(BIN)/python -m nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

gpu: $(VENV)/.dev ## the first hour on a GPU node, with a report in gpu-report/ (on a CPU: whether it runs)
	$(BIN)/python -m validate.gpu

fit: $(VENV)/.core ## fit profile a100-eager anew from the published figures
	$(BIN)/python -m validate.published.fit
	$(BIN)/python -m validate.profiles

engines: $(VENV)/.core ## fit the records of vllm, sglang, trtllm and serving again (SETTINGS=FILE.csv CONFIGS=FOLDER PREFILLS=FILE.csv,FILE.csv)
	@[ -n "$(SETTINGS)" ] && [ -n "$(CONFIGS)" ] && [ -n "$(PREFILLS)" ] || { echo "make engines: SETTINGS=FILE.csv CONFIGS=FOLDER PREFILLS=FILE.csv,FILE.csv, see calibrate/engines" >&2; exit 2; }
	$(BIN)/python -m calibrate.engines "$(SETTINGS)" --configs "$(CONFIGS)" --prefills "$(PREFILLS)"

models: $(VENV)/.dev ## write the catalogue of model types and its page anew (transformers' classes)
	$(BIN)/python -m calibrate.catalogue
	$(BIN)/python -m validate.models

profiles: $(VENV)/.core ## fit the other shipped profiles again (VIDUR=clone of github.com/microsoft/vidur AISIMULATE=wheel)
	@[ -n "$(VIDUR)" ] || { echo "make profiles: VIDUR=CLONE, a git clone of https://github.com/microsoft/vidur" >&2; exit 2; }
	@$(PIP_INSTALL) -e '.[import]'
	@[ -n "$(AISIMULATE)" ] || $(PIP_INSTALL) --no-deps --pre aisimulate==0.13.0.dev202610270000000085
	$(BIN)/python -m calibrate.shipped.recipes --vidur "$(VIDUR)" $(if $(AISIMULATE),--aisimulate "$(AISIMULATE)")
	$(BIN)/python -m validate.profiles

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. Stamps keep it from being installed again until the pins change. A .venv holds absolute paths, so
# a copied or moved checkout makes its own: .made says where it was made.

ifneq ($(shell cat $(VENV)/.made 2>/dev/null),$(CURDIR))
.PHONY: $(VENV)/.made
endif

$(VENV)/.made:
	@"$(PYTHON)" -c '' >/dev/null 2>&1 || { echo "make: no $(PYTHON) here; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is $$("$(PYTHON)" --version 2>&1), kvrsim needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear $(VENV)
	@echo "$(CURDIR)" > $@

$(VENV)/.core: $(VENV)/.made $(PINS)
	@echo "installing kvrsim into $(VENV) (once; about a minute)" >&2
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core $(PINS)
	@echo "installing the tools for checks and tests into $(VENV) (once)" >&2
	@$(PIP_INSTALL) -e '.[dev,docs,hardware]'
	@touch $@
