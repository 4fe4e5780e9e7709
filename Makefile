# Every target works in any order, again and again, and in a folder with a space in its name:
# all paths are relative, and Python programs are started by `python -m`.

PYTHON_ENV := .venv/bin/python
PYTEST_ARGS ?=
CAMPAIGN_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help env demo test test-slow lint campaign clean

help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

env: ## make .venv with everything that is needed (nothing to do when it is up to date)
	@bash tools/make_env.sh

demo: env ## train a small LLaMA while ranks are killed
	@bash examples/demo.sh

test: env ## run the tests
	@$(PYTHON_ENV) -m pytest $(PYTEST_ARGS)

test-slow: env ## run the fault campaigns that the tests leave out (minutes)
	@$(PYTHON_ENV) -m pytest -m slow $(PYTEST_ARGS)

lint: env ## ruff, and mypy --strict on the modules without torch and MPI
	@$(PYTHON_ENV) -m ruff check .
	@$(PYTHON_ENV) -m ruff format --check .
	@$(PYTHON_ENV) -m mypy

campaign: env ## run the ready fault campaigns and print their table; goes on where it was stopped
	@$(PYTHON_ENV) tools/campaign.py examples/campaigns/*.yaml $(CAMPAIGN_ARGS)

clean: ## remove .venv and caches
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
