"""Anthropic's Messages API: its own request, answer and event formats around the common chat."""

from .messages import router

__all__ = ["router"]
