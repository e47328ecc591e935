# Everything runs in .venv, which the first target that needs it creates.
SHELL := /bin/bash
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/installed
UV_VERSION := 0.13.9

# uv does not read pip's settings: a torch wheel that lies on disk, and a certificate file, are handed on.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
ifneq ($(PIP_CERT),)
export SSL_CERT_FILE ?= $(PIP_CERT)
endif
# Without compiled modules every process would spend seconds on compiling torch, transformers and Ray anew.
unexport PYTHONDONTWRITEBYTECODE
# DeepSpeed's CUDA extensions are built when first used, not at installation.
export DS_BUILD_OPS := 0
# The general index has no CPU build of torch: without one in the find-links directory, uv knows where to ask.
TORCH_WHEEL := $(wildcard $(addsuffix /torch-2.13.0+cpu-*.whl,$(PIP_FIND_LINKS)))
TORCH_BACKEND := $(if $(TORCH_WHEEL),,--torch-backend cpu)

.PHONY: install demo up down check test bench clean

install: $(STAMP)

$(STAMP): pyproject.toml deployments/constraints.txt deployments/constraints-cpu.txt deployments/overrides.txt
	@[ "$$(uname -sm)" = "Linux x86_64" ] || { echo "error: this is $$(uname -sm); the CPU set has wheels for Linux x86_64 only: use such a machine" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or give PYTHON=/path/to/python3.11" >&2; exit 1; }
	@command -v c++ >/dev/null || { echo "error: no C++ compiler (c++) found; vLLM and DeepSpeed compile kernels at first use: install g++" >&2; exit 1; }
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(TORCH_BACKEND) \
		--constraints deployments/constraints.txt --constraints deployments/constraints-cpu.txt \
		--overrides deployments/overrides.txt --editable '.[cpu,dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/rlhf demo

up: $(STAMP)
	$(BIN)/rlhf up

down: $(STAMP)
	$(BIN)/rlhf down

# Lint, types, import contracts and the tests that need no engine: under two minutes, before every commit.
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/pytest -m "not engines"

# Everything; what .ci/run calls.
test: check
	$(BIN)/pytest -m engines

# What takes longer; times are those of two idle cores. The first five keep in .rlhf/bench what they have finished and go
# on from there. Figures go into docs/.
bench: $(STAMP)
	$(BIN)/python tests/benchmarks/learning.py        # half an hour: what the demo learns, three seeds, and bfloat16
	$(BIN)/python tests/benchmarks/over_optimisation.py  # 40 minutes: PPO with the reward model alone, on generated and on-policy pairs
	$(BIN)/python tests/benchmarks/presets.py         # an hour: what each preset of RL learns, three seeds
	$(BIN)/python tests/benchmarks/kills.py           # 40 minutes: 42 stages killed at random, and resumed
	$(BIN)/python tests/benchmarks/cuts.py            # 3 minutes: 336 cuts of an optimizer step, against plain PyTorch
	$(BIN)/python tests/benchmarks/shared_ranks.py    # 3 minutes: the same of four ranks, tensor or sequence parallel 2 x data 2
	$(BIN)/python tests/benchmarks/token_memory.py    # a minute: memory while rows become tokens
	$(BIN)/python tests/benchmarks/logprob_memory.py  # 4 minutes: peak memory of log-probs, vocabulary of 128k

clean:
	rm -rf .venv .rlhf
