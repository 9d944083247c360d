"""Choice kernels: index keys, scores of groups, the best of them."""
