"""Measure attentions on a pretrained model, as it is or trained for a few steps."""
