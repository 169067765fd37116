# `make demo` and `make test` are all a newcomer needs; both install what is missing first.
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MODEL  := smollm2-135m
PYTHON ?= python3

# A prompt may hold quotes, dollars and line breaks: it travels in the environment, never through the shell's parser.
export TIERCEL_DEMO_PROMPT = $(value PROMPT)

.PHONY: help setup model demo test lint fmt peers clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## install into .venv

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard tiercel/native/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

model: $(STAMP)  ## fetch the default model
	@$(BIN)/tiercel pull $(MODEL)

demo: model  ## answer a few prompts (and yours: PROMPT="…"), show tokens, acceptance, times and speed
	@$(BIN)/tiercel demo

lint: $(STAMP)  ## lint, format check, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint model  ## lint, types and every test that needs no GPU
	$(BIN)/pytest

fmt: $(STAMP)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

peers: $(STAMP)  ## environments of the engines that `tiercel bench peers` compares with (llama.cpp is compiled: minutes)
	$(BIN)/tiercel bench peers --setup llama_cpp --setup openvino --setup transformers

clean:  ## remove what was built (not the model, nor the environments of `make peers`)
	rm -rf $(VENV) build dist tiercel/native/*.so demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
