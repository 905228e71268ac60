# make train   create the environment, install, train CartPole with a live display
# make test    lint, types, tests
# make bench   how close to this machine's limit training runs, and streams (half an hour; RAY=PYTHON: an interpreter that
#              has Ray, to compare with); make rivals: other libraries (hours)
VENV ?= .venv
PYTHON ?= python3
SRL := $(VENV)/bin/srl
SOURCES := pyproject.toml hatch_build.py $(wildcard src/srl/*/*.c)
RUN := runs/cartpole-$(shell date +%Y%m%d-%H%M%S)

.PHONY: train test lint bench rivals learn install clean
.DEFAULT_GOAL := train

train: $(VENV)/.installed
	$(SRL) train cartpole --out $(RUN)

test: lint
	$(VENV)/bin/pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check src tests examples benchmarks hatch_build.py
	$(VENV)/bin/ruff format --check src tests examples benchmarks hatch_build.py
	$(VENV)/bin/mypy

bench: $(VENV)/.installed-dev
	$(SRL) bench roofline --json benchmarks/results/roofline.json --picture docs/img/roofline.png
	$(SRL) bench streams --json benchmarks/results/streams.json $(if $(RAY),--ray $(RAY))

rivals: $(VENV)/.installed-dev
	$(SRL) bench rivals --json benchmarks/results/rivals.json

learn: $(VENV)/.installed-dev
	$(VENV)/bin/python benchmarks/learn.py

install: $(VENV)/.installed-dev

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/pip $(SOURCES)
	@echo "installing SRL into $(VENV), which takes a minute or two …"
	@$(VENV)/bin/pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/pip $(SOURCES)
	@echo "installing SRL and its development tools into $(VENV), which takes a minute or two …"
	@$(VENV)/bin/pip install --quiet --editable '.[atari,mujoco,multiagent,ray,video,onnx,wandb,prometheus,dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
