"""Speculation: the next tokens are guessed, and a step verifies several at once.

control     the engine's interface; owns the proposer and the measurements
pace        how many guesses a step should verify
log, lookup guesses from earlier tokens
draft       guesses from a draft model
verify      samples tokens from the logits of such a step
"""
