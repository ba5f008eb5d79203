"""HTTP on top of the engine thread: OpenAI's and Anthropic's APIs, operations, and who may use them.

    app.py          the application: routes, limits, keys, errors in each API's own format
    backend.py      the model behind it: one engine thread, its tokenizer, generations as async streams
    body.py         what request bodies of all APIs are made of
    chat.py         what both chat APIs become: a `ChatCall` in; reasoning, text and tool calls out
    openai/         /v1/chat/completions, /v1/completions, /v1/responses, /v1/models
    anthropic/      /v1/messages, /v1/messages/count_tokens
    admin.py        /health, /metrics, /admin/cache

The event loop never calls MLX and never waits for it; what it needs of the engine goes through `backend`.
"""
