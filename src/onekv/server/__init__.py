"""HTTP on top of the engine thread: OpenAI's, Anthropic's and Ollama's APIs, operations, and access control.

    app.py          the application: routes, limits, keys, errors in each API's own format
    backend.py      the model behind it: one engine thread, its tokenizer, generations
    model_settings.py, sampling_defaults.py
                    the model as clients see it: names, template, sampling defaults
    models/         several models in one budget: which are loaded, and which a request gets
    body.py         base of the request bodies of all APIs
    call.py         the common form of a chat request in all APIs: a `ChatCall`
    chat.py         from a `ChatCall` to generations, and from their output to typed deltas
    deltas.py       the model's output in a common form: text, tool calls, finish reason
    segments.py     splits a model's text into these; call_parts.py and xml_parts.py stream arguments
    answer.py       the base of all endpoints that generate: each API renders deltas in its format
    openai/         /v1/chat/completions, /v1/completions, /v1/responses, /v1/models
    anthropic/      /v1/messages, /v1/messages/count_tokens
    ollama/         /api/chat, /api/generate, and what lists models
    tokens.py       /tokenize, /detokenize
    admin/          /health, /metrics, /admin/cache, /admin/integrity, /admin/models
    watch.py        whether the engine makes progress; the watchdog
    journal.py      the id of each request, and its line in the log
    logs.py         where the log goes, as text or as JSON

The path of a token: the engine's thread, `Inbox`, one coroutine (`AnswerResponse`) that turns what has arrived into
typed deltas, has them rendered in the API's format, and sends them in one write. The event loop never calls MLX and
never waits for it; it reaches the engine only through `backend`.
"""
