# Two commands: `make demo` (install, get a model, see it answer) and `make test` (what a change must pass).
# Everything lives in .venv; stamp files there keep the second run quick.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
MINUTES ?= 20
PROMPT ?= What does a language model do, in two sentences?
# On Linux the wheels on PyPI may bring 2 GB of CUDA libraries; PyTorch's own index has builds without them.
CPU_TORCH := torch==2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
GPU_TORCH := torch>=2.11
# Kernels for GPUs are tested in Triton's interpreter where no GPU is; with one, torch brings the Triton it needs.
CPU_TRITON := triton>=3.6,<3.9; platform_system == 'Linux' and platform_machine == 'x86_64'
NATIVE := setup.py $(wildcard $(addprefix src/flatout/kernels/native/*., cpp h inc))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test long bench format clean

demo: $(VENV)/.installed
	@$(BIN)/flatout pull smollm2
	$(BIN)/flatout generate "$(PROMPT)"

test: $(VENV)/.test
	@$(BIN)/flatout pull smollm2
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)

# soak tests; of random steps, `make long MINUTES=120` runs two hours
long: $(VENV)/.test
	@$(BIN)/flatout pull smollm2
	$(BIN)/python -m pytest -m long --minutes $(MINUTES)

bench: $(VENV)/.test
	@$(BIN)/flatout pull smollm2
	$(BIN)/flatout bench offline
	$(BIN)/flatout bench compare

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build src/*.egg-info src/flatout/kernels/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "flatout needs Python 3.11 or newer; none was found. Say which: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@if nvidia-smi -L >/dev/null 2>&1; then \
		echo "an NVIDIA GPU is here: installing $(GPU_TORCH)"; $(PIP) "$(GPU_TORCH)"; \
	else \
		echo "no NVIDIA GPU: installing $(CPU_TORCH) for the CPU"; \
		$(PIP) --retries 0 --timeout 20 --index-url $(CPU_INDEX) "$(CPU_TORCH)" || $(PIP) "$(CPU_TORCH)"; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(NATIVE)
	$(PIP) -q -e '.[all]'
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) -q -e '.[test]'
	@if $(BIN)/python -c "import torch; raise SystemExit(torch.cuda.is_available())"; then $(PIP) -q "$(CPU_TRITON)"; fi
	@touch $@
