.DEFAULT_GOAL := help
.PHONY: help setup demo demo-glm test test-all check format

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## build .venv; the other commands do it when it is missing or out of date
	@PYTHON="$(PYTHON)" scripts/setup

demo: setup ## serve a small model over three CPU devices and ask it about a long document
	@.venv/bin/python scripts/demo.py

demo-glm: setup ## recall and drafts of a tiny GLM over four CPU devices
	@.venv/bin/python -m scripts.demo_glm

test: setup ## run the tests
	@scripts/test

test-all: setup ## run the tests, the long matrices of settings included
	@scripts/test --all

check: setup ## formatter, linter, types, import contracts, notebook pairs
	@scripts/check

format: setup ## let the formatter and the linter repair what they can
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .
