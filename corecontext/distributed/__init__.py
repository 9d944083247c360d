"""One sequence on several processes: its layout, its exchanges and its backward."""
