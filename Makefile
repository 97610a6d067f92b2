# One word each; `make` alone lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# PYTHON makes .venv: Python 3.11, for which the CPU builds of vLLM and torch exist.
PYTHON ?= python3.11
# Where pip does not find torch's CPU build by itself, TORCH_INDEX_URL names an index that has it.
TORCH_INDEX_URL ?=

export PATH := $(CURDIR)/.venv/bin:$(PATH)

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

.PHONY: proto
proto: .venv/.stamp ## Generate the Python code of proto/tokentape/v1
	$(call say,proto: generating proto/python/tokentape/v1)
	rm -f proto/python/tokentape/v1/*_pb2*
	python -m grpc_tools.protoc -I proto --python_out=proto/python --grpc_python_out=proto/python \
	  --mypy_out=proto/python --mypy_grpc_out=proto/python proto/tokentape/v1/*.proto
