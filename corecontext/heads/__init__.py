"""The heads that keep every token: their budget, the search for them, and its report."""
