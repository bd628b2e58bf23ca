# Every target sets itself up first and works on a fresh clone.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
export HF_HUB_OFFLINE := 1
# forwards of tests and demonstration share their cores with nodes: sleep instead of spinning
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup demo test check bench sanitize clean

setup:
	@PYTHON=$(PYTHON) scripts/setup.sh

demo: setup
	@$(RUN) -m demo

test: setup
	@$(RUN) -m app prepare smollm2
	@$(RUN) -m pytest

check: setup
	@$(VENV)/bin/ruff check app tests bench demo
	@$(VENV)/bin/ruff format --check app tests bench demo
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache

bench: setup
	@$(RUN) -m bench transfer

sanitize: setup
	@scripts/sanitize.sh $(VENV)/bin

clean:
	rm -rf $(VENV) build bench/results
