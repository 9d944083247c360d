.PHONY: check test slow docs

PYTHON ?= .venv/bin/python

check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m slow

docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
