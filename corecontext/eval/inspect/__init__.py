"""A page that shows the pooling and attention weights of a model."""
