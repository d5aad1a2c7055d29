# Each command makes its own .venv with what it needs; nothing has to be installed by hand.
#   make demo                            the main job once, with a table at the end; writes demo-output/
#   make test [ARGS="tests/cache -x"]    every promise that needs no GPU, on a few networks of different build
#   make test TORCH=2.15.0               the same with another torch, in an environment of its own inside .venv
#   make test-gpu                        the tests that need one
#   make test-large                      on all other networks, and what takes gigabytes or minutes; needs about 12 GB
#   make lint                            ruff and mypy
# Variables: COMFYUI_PATH (a ComfyUI's root; otherwise it is looked for), PYTHON (the Python to make .venv with),
# FRONT_END (a version of ComfyUI's front end for the browser tests; otherwise the one that ComfyUI asks for, and the
# newest that was tried in test-large), TORCH (a version of torch for the tests; otherwise that of constraints.txt).

PYTHON3 ?= python3
TORCH ?=
venv := .venv$(if $(TORCH),/torch-$(TORCH))
MAKE_VENV := $(PYTHON3) tools/make_venv.py $(if $(TORCH),--torch $(TORCH))
VENV_PYTHON := $(venv)/bin/python
ARGS ?=
export PYTHONUNBUFFERED = 1
# The newest front end that the browser tests were run on.
NEWEST_FRONT_END := 1.58.1
FRONT_END ?=
front_end = $(if $(1),NEXFORT_TEST_FRONT_END=$(CURDIR)/$(venv)/front-ends/$(1))

# Where Python is told to keep no bytecode, each of hundreds of processes would compile all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-gpu test-large lint clean

help:
	@sed -n 's/^#   //p' Makefile

demo:
	@$(MAKE_VENV) demo
	@$(VENV_PYTHON) -m demo $(ARGS)

test:
	@$(MAKE_VENV) test $(if $(FRONT_END),--front-end $(FRONT_END))
	@$(call front_end,$(FRONT_END)) $(VENV_PYTHON) -m pytest -m "not gpu and not large" -n auto --dist loadfile $(ARGS); status=$$?; \
	if [ $$status -eq 5 ]; then echo "No test was collected, so nothing was proved. Look at ARGS."; fi; \
	exit $$status

test-gpu:
	@$(MAKE_VENV) test
	@$(VENV_PYTHON) -m pytest -m gpu $(ARGS)

test-large: FRONT_END := $(or $(FRONT_END),$(NEWEST_FRONT_END))
test-large:
	@$(MAKE_VENV) test --front-end $(FRONT_END)
	@$(call front_end,$(FRONT_END)) $(VENV_PYTHON) -m pytest -m large $(ARGS)

lint:
	@$(PYTHON3) tools/make_venv.py lint
	@.venv/bin/ruff check .
	@.venv/bin/mypy

clean:
	rm -rf .venv demo-output build
