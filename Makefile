# One word each; `make` alone lists them. Everything that they need, they make: a fresh checkout needs `make demo` only.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# Settings, for the command line or the environment; requirements/README.md says more.
#   PYTHON         the Python 3.11 that makes .venv; by default one is looked for
#   PYTHON_GYM     the Python 3.13 or 3.12 that makes .venv-gym; by default one is looked for
#   TORCH_INDEX_URL  an index that has torch's CPU build, where pip does not find it by itself

MODEL := .cache/SmolLM2-135M-Instruct
GENERATED := proto/python/tokentape/v1
PROTOC := python -m grpc_tools.protoc -I proto proto/tokentape/v1/*.proto

export PATH := $(CURDIR)/.venv/bin:$(PATH)

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"
# `$(call protoc,DIRECTORY)`: the generated code, below DIRECTORY.
protoc = $(PROTOC) --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1)
# `$(call borrowing,ENVIRONMENT)`: a new environment that has what .venv has.
borrowing = python -m venv --clear --without-pip $(1) && \
  python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >$$(echo $(1)/lib/python3*/site-packages)/borrowed.pth
# `$(call moved,ENVIRONMENT)`: a prerequisite that is never up to date, if ENVIRONMENT was made for another checkout.
moved = $(if $(filter-out $(CURDIR),$(shell cat $(1)/.stamp 2>/dev/null)),moved)

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

.PHONY: demo
demo: .venv/.stamp .venv-gym/.stamp $(MODEL)/config.json ## Run three math questions through NeMo Gym and vLLM; show every token
	$(call say,demo: three rollouts through NeMo Gym$(comma) bridge$(comma) sidecar and vLLM)
	@exec python -m tokentape_executor.demo --model $(MODEL)

.PHONY: test
test: .venv/.stamp .venv-gym/.stamp $(MODEL)/config.json ## Run every test, those on real vLLM and NeMo Gym included
	$(call say,test: unit$(comma) contract and integration tests; PYTEST_ADDOPTS adds options)
	@python -m pytest -m 'not real' -n 2 --dist loadfile --durations=10
	$(call say,test: on real vLLM and real NeMo Gym)
	@# In one process of their own, and without the check of what the garbage collector finds: vLLM leaves it sockets.
	@exec python -m pytest tests/real tests/integration -m real --require-real -p no:unraisableexception --durations=10

.PHONY: soak
soak: .venv/.stamp ## Run 1,000 rollouts at once for ten minutes, without a GPU; SOAK="--rollouts 100 --seconds 60" for less
	$(call say,soak: a scripted sidecar$(comma) rollouts that disconnect and abort$(comma) and what is left open after)
	@exec python -m bench.soak $(SOAK)

.PHONY: bench
bench: .venv/.stamp .cache/bench-smg/.stamp .cache/bench-tools/.stamp $(MODEL)/config.json ## Measure tokentape beside its peers (half an hour, no GPU); write the table and plots of bench/README.md
	$(call say,bench: sidecar$(comma) bridge and peers on an engine that pushes; logs and results in out/bench)
	@python -m bench.compare $(BENCH)
	$(call say,bench: conversations of many turns)
	-@python -m bench.turns
	$(call say,bench: memory of the sidecar)
	-@python -m bench.memory
	$(call say,bench: where the time goes)
	-@python -m bench.profiling
	$(call say,bench: bench/README.md)
	@.cache/bench-tools/bin/python -m bench.report

.PHONY: check
check: .venv/.stamp ## Lint, formats, types, imports between components, contract, generated code
	$(call say,check: ruff)
	@ruff check
	@ruff format --check
	$(call say,check: types)
	@basedpyright
	$(call say,check: imports between components)
	@lint-imports
	$(call say,check: contract)
	@buf lint
	@buf format --diff --exit-code
	$(call say,check: generated code is what $(GENERATED) holds)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call protoc,"$$fresh") && \
	  diff -r --exclude=__pycache__ --exclude=__init__.py "$$fresh/tokentape/v1" $(GENERATED) || \
	  { echo 'error: the generated code differs from the contract; run: make proto' >&2; exit 1; }
	$(call say,check: passed)

.PHONY: proto
proto: .venv/.stamp ## Generate the Python code of proto/tokentape/v1
	$(call say,proto: generating $(GENERATED))
	@rm -f $(GENERATED)/*_pb2*
	@$(call protoc,proto/python)

.PHONY: lock
lock: ## Take new versions into requirements/*.lock
	$(call say,lock: resolving requirements/*.in in new environments (some minutes))
	@requirements/resolve.sh

.PHONY: clean
clean: ## Remove the environments, the model and everything else that was made here
	$(call say,clean: removing what was made)
	rm -rf .venv .venv-gym .cache out dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +

.venv/.stamp: requirements/engine.lock pyproject.toml $(call moved,.venv)
	$(call say,.venv: Python 3.11 with the engine$(comma) the components and the tools (3.5 GB$(comma) some minutes))
	@requirements/make_venv.sh .venv requirements/engine.lock PYTHON 3.11
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@echo '$(CURDIR)' >$@

.venv-gym/.stamp: requirements/gym.lock $(call moved,.venv-gym)
	$(call say,.venv-gym: Python 3.13 or 3.12 with NeMo Gym (1.4 GB$(comma) some minutes))
	@requirements/make_venv.sh .venv-gym requirements/gym.lock PYTHON_GYM 3.13 3.12
	@echo '$(CURDIR)' >$@

# Environments of the bench alone. A peer's has the engine of .venv: all are measured on the same vLLM.
.cache/bench-smg/.stamp: .venv/.stamp
	$(call say,.cache/bench-smg: smg-grpc-servicer 0.14.1 on the vLLM of .venv)
	@$(call borrowing,.cache/bench-smg)
	@.venv/bin/python -m pip --python .cache/bench-smg/bin/python install --quiet --disable-pip-version-check --no-deps \
	  smg-grpc-servicer==0.14.1 smg-grpc-proto==0.4.28
	@touch $@

.cache/bench-rust/.stamp: .venv/.stamp bench/vllm-rust.txt
	$(call say,.cache/bench-rust: the Rust front end out of vLLM's own wheel (330 MB to download$(comma) 60 MB kept))
	@rm -rf .cache/bench-rust && mkdir -p .cache/bench-rust
	@.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
	  --dest .cache/bench-rust --requirement bench/vllm-rust.txt
	@python -m bench.unpack_rust .cache/bench-rust
	@touch $@

.cache/bench-tools/.stamp: .venv/.stamp
	$(call say,.cache/bench-tools: matplotlib and py-spy)
	@$(call borrowing,.cache/bench-tools)
	@.venv/bin/python -m pip --python .cache/bench-tools/bin/python install --quiet --disable-pip-version-check matplotlib py-spy
	@touch $@

# Order only: the model does not change with the environment.
$(MODEL)/config.json: | .venv/.stamp
	$(call say,model: SmolLM2-135M-Instruct (20 s$(comma) 269 MB))
	@python -m tokentape_executor.demo.model $(MODEL)

.PHONY: moved
moved:

comma := ,
