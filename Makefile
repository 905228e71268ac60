# make train   create the environment, install, train CartPole with a live display
# make test    lint, types, tests
# make bench   how close to this machine's limit training runs, and streams (half an hour; RAY=PYTHON: an interpreter that
#              has Ray, to compare with); make rivals: other libraries (hours)
# make system-packages   as root on Debian: what the tests of Slurm need; without it they are skipped
VENV ?= .venv
PYTHON ?= python3
SRL := $(VENV)/bin/srl
SOURCES := pyproject.toml hatch_build.py $(wildcard src/srl/*/*.[ch])
RUN := runs/cartpole-$(shell date +%Y%m%d-%H%M%S)

.PHONY: train test lint bench rivals learn install system-packages clean
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

# RUNLEVEL=1: the daemons are installed, not started.
system-packages:
	@if { command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null; then :; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "not root, or no apt-get here: slurm-wlm and munge are not installed, the tests of Slurm will be skipped"; \
	else \
		echo "installing slurm-wlm and munge …"; \
		export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
		{ timeout 120 apt-get -qq update && timeout 300 apt-get -qq install --no-install-recommends slurm-wlm munge; } \
		>/dev/null 2>&1 \
		|| echo "slurm-wlm and munge cannot be installed, the tests of Slurm will be skipped"; \
	fi

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
