# `make run` shows the whole method on bundled images; `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Test processes; each has one thread.
JOBS ?= 2

.PHONY: test run lint types unit clean

test: lint types unit

# Trains a universally slimmable MobileNet v1 on the bundled images and writes its report.
run: $(STAMP)
	$(BIN)/anywidth train

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Installs again only if pyproject.toml or constraints.txt has changed.
$(STAMP): pyproject.toml runtime/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable runtime --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV)
