"""HTTP on top of the engine thread: OpenAI's, Anthropic's and Ollama's APIs, operations, and who may use them.

    app.py          the application: routes, limits, keys, errors in each API's own format
    backend.py      the model behind it: one engine thread, its tokenizer, generations
    model_settings.py, sampling_defaults.py
                    the model as clients see it: names, template, how it is sampled where a request does not say
    models/         several models in one budget: which are loaded, and which a request gets
    body.py         what request bodies of all APIs are made of
    call.py         what all chat APIs ask for, in one form: a `ChatCall`
    chat.py         from a `ChatCall` to what is generated, and from what comes to typed deltas
    deltas.py       what the model says, in one form: text, tool calls, how it finished
    segments.py     splits a model's text into these; call_parts.py and xml_parts.py give arguments as they come
    answer.py       the base of all endpoints that generate: an API says how it writes deltas
    openai/         /v1/chat/completions, /v1/completions, /v1/responses, /v1/models
    anthropic/      /v1/messages, /v1/messages/count_tokens
    ollama/         /api/chat, /api/generate, and what lists models
    tokens.py       /tokenize, /detokenize
    admin/          /health, /metrics, /admin/cache, /admin/integrity, /admin/models
    watch.py        whether the engine gets on; the watchdog
    journal.py      the id of each request, and its line in the log
    logs.py         where the log goes, as text or as JSON

A token's way: engine's thread, `Inbox`, one coroutine (`AnswerResponse`) that makes typed deltas of what has come, has
them written in the API's format, and sends all of it at once. The event loop never calls MLX and never waits for it;
what it needs of the engine goes through `backend`.
"""
