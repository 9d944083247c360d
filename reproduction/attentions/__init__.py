"""Rivals that no command of the package offers: MInference, LongLoRA, DuoAttention, pooling."""
