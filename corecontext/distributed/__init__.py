"""Context parallelism, one sequence on several processes: its layout, its exchanges, its
backward."""
