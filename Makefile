.PHONY: check test slow lowest vllm docs

PYTHON ?= .venv/bin/python

check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m slow --dist worksteal

lowest:
	python3.10 tests/lowest.py

vllm:
	$(PYTHON) tests/vllm_release.py 0.32.0

docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
