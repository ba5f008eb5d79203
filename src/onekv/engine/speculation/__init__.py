"""Speculation: tokens that may come next are guessed, and a step verifies several at once.

control     what the engine asks and tells; who guesses, and what was learned of that
pace        how many guesses a step should verify
log, lookup guesses from tokens that were seen
draft       guesses of a smaller model
verify      from the logits of such a step to tokens
"""
