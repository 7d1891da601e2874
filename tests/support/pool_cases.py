"""Requests that two pools must answer as the oracle does, and what of two answers must be equal."""

import json

TEXTS = [
    "The capital of France is",
    "Once upon a time there was a small",
    "def add(a, b):\n    return",
    "Príliš žltučký kôň úpel",
    "1, 2, 3, 4,",
    "Why is the sky blue?",
    "List three colours:",
    "x",
    "The river runs to the sea and the sea " * 4,
    "In the beginning " * 12,
]


def completion(prompt, **more):
    return "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0} | more


def chat(text, **more):
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    return "/v1/chat/completions", body | more


def cases(first_token_of, texts_of):
    """50 prompts and ways to ask. `first_token_of(prompt)`: the id that the oracle chooses first;
    `texts_of(prompt)`: the texts of the first two tokens."""
    found = [completion(text) for text in TEXTS]
    found += [chat(text) for text in TEXTS]
    found += [completion(text, max_tokens=1) for text in TEXTS[:3]]
    found += [chat(text, max_tokens=1) for text in TEXTS[:2]]
    for text in TEXTS[:3]:
        token = first_token_of(text)
        found.append(completion(text, stop_token_ids=[token]))
        found.append(completion(text, stop_token_ids=[token], min_tokens=3))
    for text in TEXTS[:4]:
        one, two = texts_of(text)
        found.append(completion(text, stop=one or "\n"))
        if one and two:
            found.append(completion(text, stop=one[-1] + two[0]))
            found.append(completion(text, stop=[one[-1] + two[0]], include_stop_str_in_output=True))
    found += [completion(text, logprobs=5) for text in TEXTS[:3]]
    found += [chat(text, logprobs=True, top_logprobs=3) for text in TEXTS[:3]]
    found += [completion(text, echo=True, logprobs=2) for text in TEXTS[3:6]]
    found += [completion(TEXTS[0], echo=True, max_tokens=0, logprobs=1)]
    seeded = {"temperature": 0.9, "seed": 7}
    found += [completion(text, n=2, **seeded) for text in TEXTS[:3]]
    found += [chat(TEXTS[8], n=2, top_p=0.8, presence_penalty=0.5, **seeded)]
    found += [completion(TEXTS[8], repetition_penalty=1.2, logit_bias={"5": 3}, **seeded)]
    assert len(found) >= 50
    return found


def essence(answer):
    """All of an answer but what names it, and what tells how it was computed."""
    body = json.loads(answer)
    for key in ("id", "created", "model", "system_fingerprint"):
        body.pop(key, None)
    usage = body.get("usage") or {}
    for key in ("pages_checked", "prompt_tokens_details", "workers"):
        usage.pop(key, None)
    return body


def streamed(text):
    """Text, reasons, logprobs of each choice of a stream, and its usage."""
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    choices, usage = {}, None
    for event in events[:-1]:
        chunk = essence(event)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            entry = choices.setdefault(choice["index"], {"text": "", "logprobs": []})
            delta = choice.get("delta") or {}
            entry["text"] += choice.get("text") or delta.get("content") or ""
            entry["reason"] = choice.get("finish_reason") or entry.get("reason")
            entry["stop"] = choice.get("stop_reason") or entry.get("stop")
            logprobs = choice.get("logprobs") or {}
            entry["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
    return choices, usage
