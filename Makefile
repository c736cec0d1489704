# Every target makes the virtual environment when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: venv run test test-cluster test-outage test-evaluations check fmt

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[local,launch,dev]'
	touch $(STAMP)

run: $(STAMP)
	$(BIN)/milepost run configs/presets/laptop.toml

test: $(STAMP)
	$(BIN)/python -m pytest

test-cluster: $(STAMP)
	$(BIN)/python -m pytest -m cluster tests/e2e/test_ray_cluster.py

test-outage: $(STAMP)
	$(BIN)/python -m pytest -m outage

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/pyright

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-evaluations: $(STAMP)
	MILEPOST_EVALUATIONS=1 $(BIN)/python -m pytest tests/e2e/test_background.py
