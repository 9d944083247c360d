"""Attention kernels: core tokens, raw tokens, chosen groups; forward and backward."""
