# Every target makes the virtual environment when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VENV_SGLANG ?= .venv-sglang
SGLANG_GPU_PYTHON ?= python3
STAMP_SGLANG := $(VENV_SGLANG)/.installed
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: venv venv-sglang run test test-sglang test-sglang-gpu test-cluster test-outage test-evaluations \
	drill drill-short mutants drill-mutants check fmt

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

drill: $(STAMP)
	$(BIN)/milepost drill --kills 100

drill-short: $(STAMP)
	$(BIN)/milepost drill --kills 4 --updates 12 --minutes 10

mutants: $(STAMP)
	$(BIN)/python -m tests.faults.mutants

# The same four protocols with a step taken out, caught by the drill itself.
drill-mutants: $(STAMP)
	$(BIN)/python -m tests.faults.drilled

# The SGLang server has an environment of its own: it pins what the run's does not.
venv-sglang: $(STAMP_SGLANG)

$(STAMP_SGLANG): constraints-sglang.txt
	test -x $(VENV_SGLANG)/bin/python || $(PYTHON) -m venv $(VENV_SGLANG)
	$(VENV_SGLANG)/bin/python -m pip install --quiet -c constraints-sglang.txt torch
	$(VENV_SGLANG)/bin/python -m pip install --quiet --no-deps -r constraints-sglang.txt
	printf '%s\nimport sglang_cpu_shim\n' "$(CURDIR)/runtime/engines/sglang/cpu" > "$$($(VENV_SGLANG)/bin/python \
		-c 'import sysconfig; print(sysconfig.get_path("purelib"))')/milepost_cpu.pth"
	touch $(STAMP_SGLANG)

test-cluster: $(STAMP)
	$(BIN)/python -m pytest -m cluster tests/e2e

# The contract suite, deaths and the laptop task on the real SGLang server. Nothing in it skips.
test-sglang: $(STAMP) $(STAMP_SGLANG)
	MILEPOST_REQUIRE_SGLANG=1 MILEPOST_SGLANG_PYTHON=$(VENV_SGLANG)/bin/python \
		$(BIN)/python -m pytest -m sglang

# The same suite and deaths on one CUDA GPU, with a SGLang of its own.
test-sglang-gpu: $(STAMP)
	$(BIN)/python -m tests.contracts.on_gpu --python $(SGLANG_GPU_PYTHON) --out runs/sglang-gpu

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
