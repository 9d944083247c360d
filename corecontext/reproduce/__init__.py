"""The paper's tables and figures in miniature, or on a checkpoint: staged, resumable, one report (docs/reproduction.md)."""
