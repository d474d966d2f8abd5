# Two commands: `make demo` trains the example agent, `make test` runs every test.
# PYTHON chooses the interpreter the virtual environment is made from.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test check clean
.DEFAULT_GOAL := help

help: ## Show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(STAMP) ## Train the example agent (about three minutes)
	$(BIN)/agentrl train examples/staff/run.toml

test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest

check: $(STAMP) ## Lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "agentrl needs Python 3.11 or newer: run make PYTHON=/path/to/python3.11 demo"; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "Could not create $(VENV): install your system's python3-venv package, then run make again"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch || \
		{ echo "Could not install torch: check the network connection, then run make again"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' || \
		{ echo "Could not install agentrl: read pip's message above, then run make again"; exit 1; }
	@touch $(STAMP)

clean: ## Remove the virtual environment and all runs
	rm -rf $(VENV) runs
