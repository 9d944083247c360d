"""Several processes on one sequence."""
