"""The heads that keep every token: their budget, and the search for them."""
