# Every target sets itself up first and works on a fresh clone.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# of the demonstration: its model, and the context-parallel ranks of its prefill node
MODEL ?= smollm2
CP ?= 1
export HF_HUB_OFFLINE := 1
# forwards of tests and demonstration share their cores with nodes: sleep instead of spinning
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: model setup demo test matrix chaos check bench sanitize clean

setup:
	@PYTHON=$(PYTHON) scripts/setup.sh

demo: setup
	@$(RUN) -m demo --model $(MODEL) --cp $(CP)

test: setup
	@$(RUN) -m app prepare smollm2
	@$(RUN) -m pytest

# every combination of model, dtype, ranks, chunk and mode over the real engine (some 20 minutes)
matrix: setup
	@$(RUN) -m app prepare smollm2
	@MATRIX=full $(RUN) -m pytest tests/e2e/test_matrix.py

# faults of every kind on four nodes behind the router (at most 20 minutes); SEED picks another plan
chaos: setup
	@$(RUN) -m chaos $(if $(SEED),--seed $(SEED)) $(FLAGS)

check: setup
	@$(VENV)/bin/ruff check app tests bench chaos demo formal
	@$(VENV)/bin/ruff format --check app tests bench chaos demo formal
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache

# NAME picks one of those that `python -m bench` lists
bench: setup
	@$(RUN) -m bench $(or $(NAME),transfer) $(FLAGS)
ifndef NAME
	@$(RUN) -m bench core
endif

# the protocol's model with wider bounds than the tests explore
model: setup
	@$(RUN) -m formal

sanitize: setup
	@scripts/sanitize.sh $(VENV)/bin

clean:
	rm -rf $(VENV) build bench/results
