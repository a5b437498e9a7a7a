PYTHON ?= python3
BIN := .venv/bin

.PHONY: raven ndr routing retrieval coda fuzzy language test lint bench

raven: .venv/installed
	$(BIN)/python studies/raven_latent_code.py

ndr: .venv/installed
	$(BIN)/python studies/ndr_control_flow.py

routing: .venv/installed
	$(BIN)/python studies/modular_routing.py

retrieval: .venv/installed
	$(BIN)/python studies/contextual_retrieval.py

coda: .venv/installed
	$(BIN)/python studies/coda_composition.py
	$(BIN)/python studies/coda_composition.py --study coda_signed_pairs

fuzzy: .venv/installed
	$(BIN)/python studies/fuzzy_logic_latent_code.py

language: .venv/installed
	$(BIN)/python studies/language_modelling.py

test: .venv/installed
	$(BIN)/python -m pytest --numprocesses auto --dist loadscope --no-loadscope-reorder

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench: .venv/installed
	$(BIN)/python -m pytest tests/benchmarks --override-ini python_files='bench_*.py' --override-ini addopts=--import-mode=importlib

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
