# `make demo` and `make test` need nothing but Python 3.11 or newer: each makes the environment itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help env smollm2 demo demo-check test unit lint format examples bench-smoke clean

help:
	@echo "make demo     train the quickstart recipe: an asynchronous VCPO run, a few minutes on 2 cores"
	@echo "make test     every check that CI runs: lint, types, layers, tests, examples"
	@echo "make lint     ruff, pyright, import-linter"
	@echo "make format   let ruff format and fix the code"
	@echo "make smollm2  fetch SmolLM2-135M-Instruct (93 MB) for the benches that want a pretrained model"
	@echo "make bench-smoke   the stability benchmark's smallest grid"

env: $(READY)

$(READY): pyproject.toml constraints-cpu.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
	touch $(READY)

demo: env
	$(BIN)/vcpo train recipes/quickstart.toml --overwrite

demo-check: demo
	$(BIN)/python tests/check_demo.py runs/quickstart

test: lint unit examples

unit: env
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

examples: env
	for example in examples/[0-9]*.py; do echo "== $$example"; $(BIN)/python $$example --smoke || exit 1; done

bench-smoke: env
	$(BIN)/vcpo bench stability --grid smoke

smollm2: env
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[smollm2]'
	$(BIN)/python tools/fetch_smollm2.py

clean:
	rm -rf $(VENV) runs .vcpo-cache
