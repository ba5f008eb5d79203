"""mlx_lm.server with OneKV's classes: `onekv mlx-server` takes the same arguments, plus `--kv-memory`.

Threads, HTTP and prompts are handled by mlx-lm. Here the prompt cache gets the byte limit from the command line, every
fetch leaves one token to compute (otherwise mlx-lm's generation thread dies), and a request that cannot fit into KV
memory is rejected with the numbers before it starts.
"""

import argparse
import sys
from typing import Any

from mlx_lm import server

from ..errors import MemoryBudgetError
from ..units import format_size
from .generator import BatchGenerator, bytes_per_token
from .prompt_cache import LRUPromptCache
from .slabs import SLABS, whole_steps


class ResponseGenerator(server.ResponseGenerator):  # type: ignore[misc]
    def __init__(self, model_provider: Any, prompt_cache: Any) -> None:
        if isinstance(prompt_cache, LRUPromptCache):
            prompt_cache.leave_one = True
            arguments = getattr(model_provider, "cli_args", None)
            limit = getattr(arguments, "prompt_cache_bytes", None)
            if limit is not None:
                prompt_cache.max_bytes = min(prompt_cache.max_bytes, limit)
        self._token_bytes: tuple[Any, int] | None = None
        super().__init__(model_provider, prompt_cache)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        result = super()._tokenize(tokenizer, request, args)
        self._check_fits(len(result[0]), args.max_tokens)
        return result

    def _check_fits(self, prompt: int, max_tokens: int) -> None:
        """Raises MemoryBudgetError if the KV memory cannot hold the request in addition to the running ones."""
        size = self._bytes_per_token()
        running = list(BatchGenerator.running)
        held = sum(sum(generator.footprint().values()) for generator in running)
        promised = sum(generator.outstanding for generator in running) * size
        needed = whole_steps(prompt + max_tokens) * size
        if needed + held + promised > SLABS.limit:
            raise MemoryBudgetError(
                f"a prompt of {prompt} tokens and up to {max_tokens} more need {format_size(needed)} of KV memory; "
                f"of {format_size(SLABS.limit)}, {format_size(held + promised)} are held or promised to others; "
                "shorten the prompt, lower max_tokens, or raise --kv-memory"
            )

    def _bytes_per_token(self) -> int:
        model = self.model_provider.model
        if self._token_bytes is None or self._token_bytes[0] is not model:
            models = [model, self.model_provider.draft_model]
            self._token_bytes = (model, sum(bytes_per_token(part) for part in models if part is not None))
        return self._token_bytes[1]


def main(argv: list[str] | None = None) -> None:
    """Runs mlx_lm.server with `argv`; does not return before the server stops."""
    from .patch import install

    parser = argparse.ArgumentParser(prog="onekv mlx-server", add_help=False, allow_abbrev=False)
    parser.add_argument("--kv-memory", default=None)
    ours, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    install(kv_memory=ours.kv_memory)
    if {"-h", "--help"} & set(rest):
        print("onekv mlx-server: --kv-memory SIZE limits KV memory, like 4GiB or 50% (of what is free); default 80%\n")
    arguments = sys.argv
    sys.argv = ["onekv mlx-server", *rest]
    try:
        server.main()
    finally:
        sys.argv = arguments
