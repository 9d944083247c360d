"""Fetch: index.py scores groups, choice.py takes the best, attend.py their raw tokens;
prompt_rule.py: which prompts are read exactly."""
