"""Requests that can never be served are rejected at once, with the numbers."""

from ..errors import PromptError, TooLongError
from ..memory.plan import Plan
from ..memory.pool import Pool
from ..memory.pool.table import blocks_needed
from ..units import format_size
from .request import Request


def check_request(request: Request, plan: Plan, pools: list[Pool]) -> None:
    """Raises PromptError or TooLongError."""
    if not request.prompt:
        raise PromptError("the prompt is empty; it must have at least one token")
    if request.max_tokens < 1:
        raise PromptError(f"max_tokens is {request.max_tokens}; it must be at least 1")
    vocabulary = plan.layout.vocabulary
    for tokens, where in ((request.prompt, ""), (request.prediction, " of the prediction")):
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise PromptError(f"token id {token}{where} is out of range: the model knows ids 0 to {vocabulary - 1}")
    for pool in pools:
        needed = blocks_needed(pool.group.rule, pool.block_size, request.max_length, plan.prefill_chunk)
        if needed > pool.blocks:
            raise TooLongError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}: "
                f"{request.max_length} tokens to keep, but the KV pool holds {plan.longest}; shorten the "
                f"prompt, lower max_tokens, or raise --kv-memory (now {format_size(plan.budget)})"
            )
