"""One decoding step: append a token, score and select groups, give them slots, attend, merge the
parts."""
