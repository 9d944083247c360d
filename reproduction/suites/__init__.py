"""Benchmarks of long contexts: RULER, LongBench-E and MMLU, with their data and scores."""
