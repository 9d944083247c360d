"""The choice of groups for prompts and training: index keys, scores of groups, the best k."""
