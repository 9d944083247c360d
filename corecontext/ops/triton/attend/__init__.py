"""Attention of prompts and training, forward and backward: anywhere.py on every GPU, hopper_*.py on
Hopper; raw tokens of chosen groups."""
