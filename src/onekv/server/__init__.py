"""HTTP on top of the engine thread: OpenAI's and Anthropic's APIs, operations, and who may use them.

    app.py          the application: routes, limits, keys, errors in each API's own format
    backend.py      the model behind it: one engine thread, its tokenizer, generations
    body.py         what request bodies of all APIs are made of
    call.py         what all chat APIs ask for, in one form: a `ChatCall`
    chat.py         from a `ChatCall` to what is generated, and from what comes to typed deltas
    deltas.py       what the model says, in one form: text, tool calls, how it finished
    answer.py       the base of all endpoints that generate: an API says how it writes deltas
    openai/         /v1/chat/completions, /v1/completions, /v1/responses, /v1/models
    anthropic/      /v1/messages, /v1/messages/count_tokens
    admin/          /health, /metrics, /admin/cache, /admin/integrity

A token's way: engine's thread, `Inbox`, one coroutine (`AnswerResponse`) that makes typed deltas of what has come, has
them written in the API's format, and sends all of it at once. The event loop never calls MLX and never waits for it;
what it needs of the engine goes through `backend`.
"""
