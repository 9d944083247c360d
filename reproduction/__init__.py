"""The paper's tables and figures in miniature or on a checkpoint, in stages, one report
(docs/reproduction.md)."""
