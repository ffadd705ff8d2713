# Everything runs in .venv, which `make install` builds once and again when the requirements change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help install test demo lint bench clean

help:
	@echo "make install | test | demo | lint | bench | clean"

install: $(STAMP)

# The stamp is touched last, so an install that was interrupted is done again.
# setuptools comes first and the build is not isolated: pip would otherwise fetch a build backend that nothing pins.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@test -n "$(PYTHON)" || { echo "thinwire needs Python 3.11 or newer: make install PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "thinwire needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[test,dev,demo]'
	@touch $@

test: install
	$(BIN)/python -m pytest -q

demo: install
	$(BIN)/thinwire demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict thinwire

bench: install
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find thinwire tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
