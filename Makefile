# `make quickstart` and `make test` need nothing but Python >= 3.11 and pip: each builds .venv first, with the versions that
# constraints.txt pins. The second time that takes no time; a changed setup.cfg or constraints.txt installs again.
#
#   PYTHON=python3.12    the interpreter of .venv (default: the first of python3, python3.13, 3.12, 3.11 that is new enough)
#   EXTRAS=cuda,wandb    extras of setup.cfg to install beside the tests' (default: none, which trains on the CPU)
#   ARGS="-k gae"        more arguments for pytest or for the quickstart

SHELL := /bin/sh
VENV := .venv
RUN := $(VENV)/bin/python
EXTRAS ?=
ARGS ?=

NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p $(NEW_ENOUGH) 2>/dev/null && echo $$p && break; done)
# Looked up once. The stamp names what was asked for, so that asking for something else installs again.
INTERPRETER := $(PYTHON)
VERSION := $(if $(INTERPRETER),$(shell $(INTERPRETER) -c 'import platform; print(platform.python_version())' 2>/dev/null))
comma := ,
STAMP := $(VENV)/.installed-$(VERSION)$(addprefix -,$(subst $(comma),-,$(EXTRAS)))

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint venv clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(STAMP) ## train the built-in task on this machine, from nothing
	$(RUN) -m jax_ppo.main --config=configs/quickstart.py $(ARGS)

# Files are spread over the workers whole: tests of one file share what they compiled.
test: $(STAMP) ## run all tests
	$(RUN) -m pytest -n logical --maxprocesses 4 --dist loadfile $(ARGS)

lint: $(STAMP) ## ruff (check and format) and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy jax_ppo

venv: $(STAMP) ## only build .venv

clean: ## remove .venv and caches; runs stay
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian ships Python without ensurepip, which `python -m venv` needs; pip outside of the environment can fill it as well.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@test -n "$(INTERPRETER)" && $(INTERPRETER) $(NEW_ENOUGH) 2>/dev/null || { \
	    echo "jax_ppo needs Python >= 3.11; $(or $(INTERPRETER),python3) is $(or $(VERSION),older or missing)." \
	        "Name another: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@if ! $(RUN) -m pip --version >/dev/null 2>&1 || [ "$$($(RUN) -V)" != "Python $(VERSION)" ]; then \
	    echo "Building $(VENV) with Python $(VERSION)"; \
	    if $(INTERPRETER) -c 'import ensurepip' 2>/dev/null; then \
	        $(INTERPRETER) -m venv --clear $(VENV); \
	    else \
	        $(INTERPRETER) -m venv --clear --without-pip $(VENV) && $(INTERPRETER) -m pip --python $(RUN) install --quiet pip; \
	    fi || { rm -rf $(VENV); \
	        echo "No environment: $(INTERPRETER) lacks venv or pip (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	fi
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test$(addprefix $(comma),$(EXTRAS))]'
	@touch $@
