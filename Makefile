# Everything runs in .venv, which `make install` builds once and again when the requirements change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.installed-docs

.PHONY: help install test demo lint docs bench clean

help:
	@echo "make install | test | demo | lint | docs | bench | clean"

install: $(STAMP)

# The stamp is touched last, so an install that was interrupted is done again.
# setuptools comes first and the build is not isolated: pip would otherwise fetch a build backend that nothing pins.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@ $(DOCS_STAMP)
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

# Pages go to build/docs. A link that leads nowhere, or a name that the API reference does not find, is an error.
docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --strict

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@

bench: install
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find thinwire tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
