"""Compare indices of fetch on a pretrained model."""
