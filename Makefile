PYTHON ?= python3
BIN := .venv/bin
# Models that the zoo has are taken from there, unless `make raven TRAIN=1` trains them: then three
# seeds of each mechanism.
ZOO := $(if $(TRAIN),,--pretrained)

.PHONY: raven ndr routing retrieval coda text-pairs generation questions fuzzy language paper-gpu claims docs test test-all lint bench stress

raven: .venv/installed
	$(BIN)/python studies/raven_latent_code.py $(if $(TRAIN),,--preset best --pretrained)

ndr: .venv/installed
	$(BIN)/python studies/ndr_control_flow.py $(ZOO)

routing: .venv/installed
	$(BIN)/python studies/modular_routing.py $(ZOO)

retrieval: .venv/installed
	$(BIN)/python studies/contextual_retrieval.py $(ZOO)

coda: .venv/installed
	$(BIN)/python studies/coda_composition.py $(ZOO)
	$(BIN)/python studies/coda_composition.py $(ZOO) --study coda_signed_pairs

text-pairs: .venv/installed
	$(BIN)/python studies/text_pairs_and_sentiment.py $(ZOO)
	$(BIN)/python studies/text_pairs_and_sentiment.py $(ZOO) --study text_ranking
	$(BIN)/python studies/text_pairs_and_sentiment.py $(ZOO) --study text_sentiment

generation: .venv/installed
	$(BIN)/python studies/text_generation.py $(ZOO)
	$(BIN)/python studies/text_generation.py $(ZOO) --study algolisp

questions: .venv/installed
	$(BIN)/python studies/open_domain_question_answering.py $(ZOO)

fuzzy: .venv/installed
	$(BIN)/python studies/fuzzy_logic_latent_code.py $(ZOO)

language: .venv/installed
	$(BIN)/python studies/language_modelling.py $(ZOO)

paper-gpu: .venv/installed
	$(BIN)/python -m studies.paper_gpu --minutes $(or $(MINUTES),9)

claims: .venv/installed
	$(BIN)/python -m studies.ledger

docs: .venv/installed-docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir docs . docs/_build/html
	@echo docs/_build/html/index.html

# Many tests start processes, which start faster with bytecode on disk.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: CHOSEN = -m "not slow"
test test-all: .venv/installed
	$(BIN)/python -m pytest $(CHOSEN) --numprocesses auto --dist loadscope --no-loadscope-reorder --durations 40 --durations-min 2

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench: .venv/installed
	$(BIN)/python -m pytest tests/benchmarks --override-ini python_files='bench_*.py' --override-ini addopts=--import-mode=importlib --timeout 0

# At most an hour; STRESS=0.05 runs a share of it.
stress: .venv/installed
	$(BIN)/python -m pytest tests/stress --override-ini python_files='stress_*.py' --override-ini addopts=--import-mode=importlib --timeout 0

# Compiling every file of the packages would take longer than the rest; what is imported is compiled
# then.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[docs]'
	touch $@
