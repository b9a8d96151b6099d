# Everything runs in .venv, made on first use; models and logs lie in .cache.
# `make` alone lists the targets.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
DEMO_MODEL := .cache/smollm2
# The first Python 3.11 or 3.12 on the path (SGLang 0.5.23 needs packages without a wheel for 3.13); `make PYTHON=... env`
# overrides.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
# Tests marked gpu need a CUDA device.
MARKS := $(shell nvidia-smi -L >/dev/null 2>&1 || echo '-m "not gpu"')
COVER := --cov=zos_sglang.settings --cov=zos_sglang.upstream --cov=zos_sglang.overlap \
	--cov=zos_sglang.resident --cov=zos_sglang.observe --cov=zos_sglang.patchset --cov-report=term-missing:skip-covered --cov-fail-under=90

.DEFAULT_GOAL := help
.PHONY: help env demo serve test test-matrix patches-check soak lint audit docs browser clean
# The older release that test-matrix runs beside .venv's; an environment of 11 GB.
OLDER := 0.5.22
OLDER_VENV := .cache/venv-$(OLDER)

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

env: $(READY) ## the environment (.venv); free when it is up to date

$(READY): setup.py pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 found; name one: make PYTHON=/path/to/python $@"; exit 1; }
	@# Debian's Python comes without the part of venv that brings pip.
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { test "$$(id -u)" = 0 && \
		apt-get update -qq && apt-get install -y -qq python3-venv; } || \
		{ echo "error: $(PYTHON) has no ensurepip; install python3-venv"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check --quiet -e '.[test,docs]'
	@touch $@

demo: env ## our server and stock answer the same requests; prints one table
	$(PY) -m zos_sglang.testing.demo $(ARGS)

serve: env ## serve the demo model until Ctrl-C; MODEL=path ARGS="--flags" for another
ifdef MODEL
	$(PY) -m zos_sglang.testing.server $(MODEL) $(ARGS)
else
	$(PY) -m zos_sglang.testing.models smollm2 --out $(DEMO_MODEL)
	$(PY) -m zos_sglang.testing.server $(DEMO_MODEL) $(ARGS)
endif

lint: env ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: env ## the pages as a site in build/site; a broken link fails
	$(PY) scripts/build_docs.py

audit: env ## known vulnerabilities in what is installed; says so where their data cannot be reached
	$(PY) -m zos_sglang.testing.audit

browser: ## Chromium, in which a test looks at a report; as root on Debian it is installed
	@command -v chromium chromium-browser google-chrome >/dev/null || { test "$$(id -u)" = 0 && \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
		--no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
		echo "note: no Chromium, and it cannot be installed here: tests that look at a page are skipped"

test: lint audit browser ## lint and audit, then every test that this machine can run, with coverage; ZOS_SOAK_MINUTES=0: no soak
	$(PY) -m tests $(MARKS) $(COVER) $(ARGS)

patches-check: env ## the source patches on a scratch copy of SGLang: applied, run, taken out (part of test)
	$(PY) -m pytest tests/unit/test_patchset_hooks.py tests/server/test_source_patches.py $(ARGS)

MINUTES ?= 10

soak: env ## MINUTES=10 of load and disturbance on one server, every answer judged (part of test)
	$(PY) scripts/soak.py --minutes $(MINUTES) $(ARGS)

# What every supported release has to pass, each in an environment of its own: the hook table, the patch set,
# start-up, and the same answers as stock in modes overlap and resident.
MATRIX := tests/unit/test_hooks.py tests/unit/test_releases.py tests/unit/test_patchset_hooks.py tests/server/test_smoke.py

test-matrix: env ## smoke on every supported SGLang, each in its own environment (not part of test)
	@# cuda-tile is for GPU kernels only, and the version that 0.5.22 wants is fetched from outside PyPI.
	$(PY) scripts/make_release_env.py $(OLDER) $(OLDER_VENV) --without cuda-tile
	for python in $(PY) $(OLDER_VENV)/bin/python; do \
		$$python -c 'from importlib.metadata import version as v; print("== SGLang", v("sglang"))' && \
		$$python -m pytest $(MARKS) $(MATRIX) $(ARGS) || exit 1; \
	done

clean: ## remove the environment, the models and every cache
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
