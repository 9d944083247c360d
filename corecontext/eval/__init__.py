"""Evaluate a checkpoint from local files: perplexity, RULER, LongBench-E, MMLU, questions."""
