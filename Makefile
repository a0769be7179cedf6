# Two commands do everything on a machine with Python 3.11 and make:
#   make quickstart   makes .venv, installs, trains the embedded default, shows the result
#   make test         makes .venv, installs, passes the tests, in WORKERS processes of up to 6 GiB
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/quickstart
WORKERS ?= 2
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install quickstart test lint pretrain audit clean

install: $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[quickstart]'
	touch $@

$(VENV)/.installed-test: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[quickstart,test]'
	$(PIP) --no-deps dashscope  # 2 MB: its rank file is Qwen's vocabulary; its code stays unused
	touch $@ $(VENV)/.installed

quickstart: $(VENV)/.installed
	$(BIN)/python -m experiments train --config=configs/quickstart.py --workdir=$(RUN)

test: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(VENV)/.installed-test
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

pretrain: $(VENV)/.installed
	$(BIN)/python -m experiments pretrain --config=configs/quickstart.py

audit: $(VENV)/.installed
	$(BIN)/python -m experiments audit --config=configs/quickstart.py

clean:
	rm -rf $(VENV) runs *.egg-info .pytest_cache .ruff_cache .hypothesis
