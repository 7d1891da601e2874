"""Damages requests to the API at random: what is sent, byte for byte, and how the client leaves."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bifolio.request import BOUNDS
from bifolio.server.request_bodies import (
    _IGNORED,
    _NEUTRAL,
    _UNSUPPORTED,
    MAX_CHOICES,
    MAX_IDS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from support.damaged_json import ODD, change, doubled, nested

KEY, HOST = "correct", "api.test"
"""What the server is started with: --api-key and --allowed-host."""

_CONTENT = "the capital of the country"
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "the sea"},
        {"role": "user", "content": [{"type": "text", "text": _CONTENT}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "north"},
        {"role": "user", "content": _CONTENT},
    ],
}
_OPTIONS: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "n": 2,
    "min_tokens": 1,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "seed": 7,
    "stop": ["river", "sea"],
    "stop_token_ids": [9, 10],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "response_format": {"type": "text"},
    "cache_salt": "a",
    "timeout": 3.0,
}
_CHAT_OPTIONS = _OPTIONS | {
    "tools": [_TOOL],
    "tool_choice": "none",
    "add_generation_prompt": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "max_completion_tokens": 2,
    "logprobs": True,
    "top_logprobs": 2,
}
_PROMPTS = (_CONTENT, ["the sea", "the river"], [5, 6, 7, 8], [[5, 6], [7]])
_ENDPOINTS = (
    "POST /v1/chat/completions",
    "POST /v1/chat/completions stream",
    "POST /v1/completions",
    "POST /v1/completions stream",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/",
    "GET /v1/models/tiny",
    "GET /health",
    "GET /ready",
    "GET /metrics",
    "GET /version",
    "GET /openapi.json",
    "GET /tokenizer_info",
    "GET /admin/workers",
    "OPTIONS /v1/models",
    "GET /nowhere",
)
_WEIGHTS = (9, 5, 9, 5, 6, 3, *(1,) * 12)
_BODIES = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
_ODD = (
    *ODD,
    *(
        -math.inf,
        2**64,
        -(2**63) - 1,
        1e20,
        "\udfff\ud800",
        "\0",
        "\u202e",
        "<|im_end|>",
        "é" * 3,
        "👩‍👩‍👧",
        "{{ 7*7 }}",
        "a" * 1_000_000,
    ),
    *(
        {"type": "image_url"},
        [None],
        {"": ""},
        {"role": "user", "content": "x"},
        [[5]],
        ["a"] * 2000,
    ),
)


@dataclass(slots=True)
class Request:
    """A request before it becomes bytes."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    version: bytes = b"HTTP/1.1"

    def encode(self) -> bytes:
        lines = [b"%b %b %b" % (self.method, self.target, self.version)]
        lines += [b"%b: %b" % header for header in self.headers]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


@dataclass(slots=True)
class Case:
    """What a client sends, and what it does afterwards.

    `ending`: `read` the answer, `half` (say that no more comes, and read), `leave` or `reset`.
    A client that `waits` gives the server a moment before it ends what it may have left incomplete.
    """

    endpoint: str
    done: list[str] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    ending: str = "read"
    waits: bool = False


def damaged(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    endpoint = rng.choices(_ENDPOINTS, _WEIGHTS)[0]
    case = Case(endpoint)
    document = _document(rng, endpoint)
    request = _request(endpoint, document)
    kinds: list[Callable[[random.Random, Case, Request, Any], None]] = [_header, _line, _framing]
    if document is not None:
        kinds += [_field, _field, _structure, _structure, _text, _bytes]
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3))):
        change_it = rng.choice(kinds)
        change_it(rng, case, request, document)
    data = request.encode()
    if rng.random() < 0.04:
        data = _raw(rng, data)
        case.done.append("raw bytes")
        case.waits = True
    _delivery(rng, case, data)
    return case


def _document(rng: random.Random, endpoint: str) -> Any:
    """A sound body, with some of the optional fields."""
    stream = endpoint.endswith("stream")
    if "/v1/chat" in endpoint:
        options, required = _CHAT_OPTIONS, _CHAT | {"max_tokens": 3}
    elif "/v1/completions" in endpoint:
        options = _OPTIONS | {"echo": True, "logprobs": 2, "add_special_tokens": False}
        required = {"prompt": rng.choice(_PROMPTS), "max_tokens": 3}
    elif endpoint == "POST /tokenize":
        if rng.random() < 0.5:
            return {"prompt": _CONTENT, "return_token_strs": True, "add_special_tokens": False}
        return json.loads(json.dumps(_CHAT | {"continue_final_message": False}))
    elif endpoint == "POST /detokenize":
        return {"model": "tiny", "tokens": list(range(3, 30))}
    else:
        return None
    taken = {name: value for name, value in options.items() if rng.random() < 0.25}
    if taken.get("top_logprobs"):
        taken["logprobs"] = True
    if "tools" in taken:
        taken["tool_choice"] = "none"  # without it they are refused
    if not stream:
        taken.pop("stream_options", None)
    return json.loads(json.dumps(required | {"stream": stream} | taken))


def _request(endpoint: str, document: Any) -> Request:
    method, target = endpoint.removesuffix(" stream").split(" ")
    headers = {
        "Host": HOST,
        "User-Agent": "fuzz",
        "Authorization": f"Bearer {KEY}",
        "Connection": "close",
    }
    body = b""
    if document is not None:
        body = json.dumps(document).encode()
        headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    if method == "OPTIONS":
        headers |= {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request(method.encode(), target.encode(), lines, body)


# The body


def _resend(case: Case, request: Request, body: bytes, what: str) -> None:
    """Another body, of which the header tells the length."""
    request.body = body
    _set(request, b"Content-Length", str(len(body)).encode())
    case.done.append(what)


def _field(rng: random.Random, case: Case, request: Request, document: Any) -> None:
    """A field, of the body's own or of others, with a value at a bound of it or of any kind."""
    kind = next(body for name, body in _BODIES.items() if name in case.endpoint)
    names = [*kind.model_fields] * 4
    names += [
        *_IGNORED,
        *_NEUTRAL,
        *sorted(_UNSUPPORTED),
        "best_of",
        "no_such_field",
        "Model",
        "",
        "a.b[0]",
    ]
    name = rng.choice(names)
    values = _at_bounds(name)
    value = rng.choice(values) if values and rng.random() < 0.7 else rng.choice(_ODD)
    if not isinstance(document, dict):
        return
    document[name] = value
    _resend(case, request, json.dumps(document).encode(), f"{name}={repr(value)[:40]}")


def _at_bounds(name: str) -> list[Any]:
    """Values at, inside and outside the bounds of a field."""
    if name in ("logprobs", "top_logprobs"):
        name = "logprobs"
    if name == "max_completion_tokens":
        name = "max_tokens"
    if name in BOUNDS:
        low, high = BOUNDS[name].low, BOUNDS[name].high
        values: list[Any] = [low, low - 1, low + 1, low - 1e-9, low + 1e-9, float(low), str(low)]
        if high is not None:
            values += [high, high + 1, high - 1, float(high), high * (1 + 1e-9)]
        if name == "logit_bias":
            keys = ("0", "319", "320", "-1", "01", "+1", "1e3", "9" * 5000, "x", "")
            return [{key: value} for key in keys for value in values[:6]] + [
                {str(i): 0 for i in range(count)} for count in (MAX_IDS - 800, MAX_IDS, MAX_IDS + 1)
            ]
        return values
    texts = ["a", "", "a" * MAX_STOP_CHARS, "a" * (MAX_STOP_CHARS + 1), "<|im_end|>", "\ud800"]
    return {
        "n": [0, 1, 2, 128, 129, 1.0, 1.5],
        "best_of": [0, 1, 2, True],
        "stop": [*texts, [], [""], ["a"] * MAX_STOPS, ["a"] * (MAX_STOPS + 1), texts],
        "stop_token_ids": [[], [0], [-1], [319], [320], [2**64], [5.0], [3] * (MAX_IDS + 1)],
        "cache_salt": ["", "a" * MAX_SALT_CHARS, "a" * (MAX_SALT_CHARS + 1), "\0"],
        "timeout": [0, 1e-9, 0.01, 1e308, -1, 10**400],
        "tokens": [[], [0], [-1], [319], [320], [2**31], [2**70], [5.0], [5.5], [5] * 50_000],
        "prompt": [
            *("", [], [[]], [""], [0], [-1], [319], [320], ["a", 5], [[5], "a"], [5.0], [2**64]),
            *([[5]] * MAX_CHOICES, ["a"] * (MAX_CHOICES + 1), "a " * 200, "a " * 50_000, [5] * 97),
            *("<|im_start|>" * 30, "\ud800", "a\0b", [5] * 100_000, [None], {"a": 1}),
        ],
        "messages": [
            [],
            [{}],
            ["a"],
            [{"role": "user"}],
            [{"role": "nobody", "content": "a"}],
            [{"role": "user", "content": "a " * 100_000}],
            [{"role": "user", "content": "a"}] * 300,
            [{"role": "assistant", "content": "a"}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}] * 500}],
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x"}}],
                }
            ],
        ],
        "model": ["tiny", "other", "", "../tiny", "tiny/", "TINY", "a" * 10_000, "\ud800"],
        "tools": [[], [_TOOL] * 300, [{}], [{"type": "function", "function": {"name": ""}}]],
        "tool_choice": ["none", "auto", "required", "any", {"type": "function", "function": {}}],
        "stream_options": [{}, {"include_usage": "yes"}, {"other": 1}, {"include_usage": None}],
        "response_format": [{}, {"type": "json_object"}, {"type": "text", "x": 1}, {"type": 5}],
        "chat_template_kwargs": [
            *({}, {"messages": []}, {"x" * 5000: 1}, {"tools": 1}, {"add_generation_prompt": [1]}),
            *({"raise_exception": 1}, {"bos_token": "a" * 10_000}, {"self": 1}, {"loop": None}),
        ],
    }.get(name, [])


def _structure(rng: random.Random, case: Case, request: Request, document: Any) -> None:
    """A place of the body exchanged, removed or wrapped."""
    change(rng, document, _ODD)
    _resend(case, request, json.dumps(document).encode(), "place changed")


def _text(rng: random.Random, case: Case, request: Request, document: Any) -> None:
    """JSON that is written in another way, or is none."""
    text = json.dumps(document)
    changes: tuple[tuple[str, Callable[[], str | bytes]], ...] = (
        ("nested", lambda: nested(text, rng.choice((60, 200, 300, 100_000)))),
        ("key twice", lambda: doubled(text)),
        ("byte order mark", lambda: b"\xef\xbb\xbf" + text.encode()),
        ("UTF-16", lambda: text.encode("utf-16")),
        (
            "UTF-8 spelled out",
            lambda: json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass"),
        ),
        ("latin-1", lambda: text.replace("sea", "se\xe4").encode("latin-1", "replace")),
        ("blanks", lambda: " \n" * 5000 + text + "\t" * 5000),
        ("more behind", lambda: text + rng.choice(("x", "{}", "\0", ",", "null"))),
        ("escaped", lambda: "".join(f"\\u{ord(c):04x}" if c.isalpha() else c for c in text)),
        ("digits", lambda: text.replace("3", "3" * rng.choice((20, 400, 5000)), 1)),
        (
            "exponent",
            lambda: text.replace("3", rng.choice(("1e999", "-1e999", "1e-999", "3.0e0")), 1),
        ),
        ("comments", lambda: text.replace("{", "{/* a */", 1)),
        ("quotes", lambda: text.replace('"', "'")),
        ("trailing comma", lambda: text[:-1] + ",}"),
        (
            "scalar",
            lambda: rng.choice(("null", "5", '"a"', "[]", "{}", "true", "NaN", "", "[" * 9)),
        ),
    )
    what, make = rng.choice(changes)
    made = make()
    _resend(
        case, request, made if isinstance(made, bytes) else made.encode("utf-8", "replace"), what
    )


def _bytes(rng: random.Random, case: Case, request: Request, document: Any) -> None:
    """Bytes of the body flipped, cut, doubled, or made invalid UTF-8."""
    data = bytearray(request.body or b"{}")
    at = rng.randrange(len(data))
    match rng.choice(("flip", "cut", "insert", "double", "empty", "large")):
        case "flip":
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case "cut":
            del data[at:]
        case "insert":
            data[at:at] = rng.choice(
                (b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\0", b"\xf4\x90\x80\x80")
            )
        case "double":
            data = data * 2
        case "empty":
            data.clear()
        case _ if rng.random() < 0.1:
            data += b" " * (8 * 2**20)
    _resend(case, request, bytes(data), "body's bytes")


# The head


def _set(request: Request, name: bytes, *values: bytes) -> None:
    request.headers = [h for h in request.headers if h[0].lower() != name.lower()]
    request.headers += [(name, value) for value in values]


_HEADERS: dict[bytes, tuple[bytes, ...]] = {
    b"Content-Type": (
        b"",
        b"text/plain",
        b"application/json; charset=utf-16",
        b"application/json;charset=\xff",
        b"multipart/form-data; boundary=x",
        b"application/x-www-form-urlencoded",
        b"application/problem+json",
        b"APPLICATION/JSON",
        b"a" * 5000,
        b"application/json, text/plain",
    ),
    b"Authorization": (
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"bearer correct",
        b"Basic Y29ycmVjdA==",
        b"Bearer \xff\xfe",
        b"Bearer correct correct",
        b"Bearer " + b"a" * 20_000,
    ),
    b"Host": (
        b"",
        b"localhost",
        b"127.0.0.1:80",
        b"evil.test",
        b"api.test:99999999",
        b"[::1]",
        b"\xff",
        b"api.test, evil.test",
        b"a" * 5000,
        b"[" * 100,
        b"api.test/../x",
    ),
    b"X-Request-Id": (
        b"",
        b"a",
        b"a" * 128,
        b"a" * 129,
        b"\xff\xfe",
        b"a b",
        b"a\tb",
        b"%0d%0aX: y",
        b"\x7f",
        b"<script>",
    ),
    b"Origin": (
        b"",
        b"null",
        b"http://evil.test",
        b"http://localhost:3000",
        b"\xff",
        b"http://" * 900,
    ),
    b"Access-Control-Request-Method": (b"", b"PUT", b"GET", b"\xff", b"a" * 5000),
    b"Access-Control-Request-Headers": (b"", b"x", b"\xff", b"a, " * 3000),
    b"Accept-Encoding": (b"gzip, br", b"identity;q=0", b"\xff"),
    b"Content-Encoding": (b"gzip", b"br", b"identity"),
    b"Expect": (b"100-continue", b"200-ok"),
    b"Upgrade": (b"h2c", b"websocket"),
    b"Connection": (b"keep-alive", b"Upgrade", b"close, Upgrade", b"\xff", b""),
    b"Cookie": (b"a=" + b"b" * 30_000, b"\0"),
    b"Range": (b"bytes=0-1",),
    b"X-Forwarded-For": (b"::1", b"a" * 999, b"\xff"),
    b"X-Forwarded-Proto": (b"https", b"\xff"),
    b"Traceparent": (b"00-0-0-0",),
    b"Sec-Fetch-Site": (b"cross-site",),
    b"Transfer-Encoding": (
        b"identity",
        b"gzip, chunked",
        b"Chunked ",
        b"xchunked",
        b"chunked, chunked",
    ),
    b"Keep-Alive": (b"timeout=99999999",),
    b"Trailer": (b"Content-Length",),
    b"a" * 3000: (b"b",),
    b"\xff": (b"\xfe",),
    b"A B": (b"c",),
    b"": (b"c",),
    b"A\0": (b"c",),
}


def _header(rng: random.Random, case: Case, request: Request, document: Any) -> None:
    """A header removed, doubled, with another value, or a great many of them."""
    match rng.choice(("value", "value", "value", "remove", "double", "many", "long", "fold")):
        case "value":
            name = rng.choice(list(_HEADERS))
            _set(request, name, rng.choice(_HEADERS[name]))
            what = f"{name[:20]!r} changed"
        case "remove" if request.headers:
            what = f"{request.headers.pop(rng.randrange(len(request.headers)))[0]!r} removed"
        case "double" if request.headers:
            name, value = rng.choice(request.headers)
            other = rng.choice(_HEADERS.get(name, (value, b"7")))
            request.headers.insert(rng.randrange(len(request.headers)), (name, other))
            what = f"{name!r} twice"
        case "many":
            count = rng.choice((100, 119, 125, 200, 5000))
            request.headers += [(b"X-%d" % i, b"y") for i in range(count)]
            what = f"{count} headers"
        case "long":
            size = rng.choice((8_000, 60_000, 65_000, 66_000, 300_000))
            request.headers.append((b"X-Long", b"y" * size))
            what = f"header of {size}"
        case _:
            request.headers.append(
                (b"X-Folded", rng.choice((b"a\r\n b", b"a\nb: c", b"a\rb", b"\0")))
            )
            what = "folded header"
    case.done.append(what)
    case.waits = True


def _line(rng: random.Random, case: Case, request: Request, document: Any) -> None:
    """Another method, target or version."""
    match rng.choice(("method", "method", "target", "target", "query", "version")):
        case "method":
            request.method = rng.choice(
                (
                    b"GET",
                    b"HEAD",
                    b"POST",
                    b"PUT",
                    b"DELETE",
                    b"OPTIONS",
                    b"TRACE",
                    b"PATCH",
                    b"CONNECT",
                    b"get",
                    b"PRI",
                    b"FOO",
                    b"",
                    b"M-SEARCH",
                    b"\xff",
                    b"A" * 9000,
                )
            )
            case.done.append(f"method {request.method[:20]!r}")
        case "target":
            path = request.target
            request.target = rng.choice(
                (
                    path + b"/",
                    path + b"//",
                    b"/" + path,
                    path.upper(),
                    path + b"%00",
                    path + b"%ff",
                    path[1:],
                    b"*",
                    b"",
                    b"http://evil.test" + path,
                    path + b"/../../etc/passwd",
                    path + b"\xc3\xa9",
                    path + b"\xff",
                    path + b"#a",
                    path + b"%2",
                    path + b"%2e%2e",
                    b"/v1/models/" + b"a" * rng.choice((1000, 16000, 17000, 200000)),
                    b"/%2e%2e/",
                    b"/v1/models/%0d%0aX:y",
                    b"/v1/models/%ed%a0%80",
                    b"/admin/workers/p0/replace",
                    b"/admin/workers?pool=decode",
                    b"/admin/",
                    b"//evil.test/",
                    b"/docs",
                    b"/v1",
                    b"/v1/models/tiny/",
                    b"/v1/models//tiny",
                    path + b" x",
                    b"evil.test:443",
                )
            )
            case.done.append(f"target {request.target[:40]!r}")
        case "query":
            query = rng.choice(
                (b"", b"a=b", b"\xff", b"%", b"a" * 17_000, b"&" * 9000, b"pool=x", b"\t")
            )
            request.target += b"?" + query
            case.done.append("query")
        case _:
            request.version = rng.choice(
                (b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"", b"HTTP/1.10")
            )
            case.done.append(f"version {request.version!r}")
    case.waits = True


def _framing(rng: random.Random, case: Case, request: Request, document: Any) -> None:
    """A length that is wrong, or chunks."""
    body = request.body
    match rng.choice(("length", "length", "chunks", "broken chunks", "both", "no length")):
        case "length":
            size = len(body)
            value = rng.choice(
                (size - 1, size + 1, 0, size + 1000, 8 * 2**20, 8 * 2**20 + 1, 2**63, 2**64, 10**40)
            )
            text = rng.choice((f"{value}", f"{value}", f"+{size}", f"-{size}", f"{size}, {size}"))
            text = rng.choice(
                (text, text, text, "x", "", f"0x{size:x}", f"{size}.0", f"{size}\xb2")
            )
            _set(request, b"Content-Length", text.encode("latin-1"))
            case.done.append(f"length {text[:30]} of {size}")
        case "both":
            request.headers.append((b"Transfer-Encoding", b"chunked"))
            case.done.append("length and chunks")
        case "no length":
            _set(request, b"Content-Length")
            case.done.append("no length")
        case kind:
            _set(request, b"Content-Length")
            _set(request, b"Transfer-Encoding", b"chunked")
            size = rng.choice((1, 100, 10**6))
            parts = [body[i : i + size] for i in range(0, min(len(body), size * 3000), size)]
            chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]
            if kind == "broken chunks":
                at = rng.randrange(len(chunks))
                chunks[at] = rng.choice(
                    (
                        b"",
                        b"x\r\n",
                        b"-1\r\na\r\n",
                        b"ffffffffffffffff\r\n",
                        b"5\r\nab\r\n",
                        b"1\na\n",
                        b"1;" + b"a" * 70000 + b"\r\na\r\n",
                        b"0\r\nX: y\r\n\r\n",
                        b"0\r\n" + b"X: y\r\n" * 900,
                    )
                )
            request.body = b"".join(chunks)
            case.done.append(kind)
    case.waits = True


def _raw(rng: random.Random, data: bytes) -> bytes:
    """What is not HTTP, or was and has been damaged."""
    head = min(len(data), 200)
    at = rng.randrange(head)
    return rng.choice(
        (
            lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            lambda: data[:at],
            lambda: data[:at] + rng.choice((b"\0", b"\r", b"\n", b"\xff", b" ")) + data[at:],
            lambda: rng.randbytes(rng.choice((1, 100, 70_000))),
            lambda: b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + rng.randbytes(200),  # TLS
            lambda: data.replace(b"\r\n", b"\n"),
            lambda: b"\r\n" * rng.choice((1, 5, 40_000)) + data,
        )
    )()


def _delivery(rng: random.Random, case: Case, data: bytes) -> None:
    """How the bytes come, and how the client ends."""
    match rng.choices(("whole", "pieces", "twice", "half", "leave", "reset"), (60, 10, 8, 8, 8, 6))[
        0
    ]:
        case "whole":
            case.pieces = [data]
        case "pieces":
            cuts = sorted(rng.randrange(len(data)) for _ in range(3)) if data else []
            case.pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
            case.done.append("in pieces")
        case "twice":
            case.pieces = [data * 2 if rng.random() < 0.8 else data * 5]
            case.done.append("pipelined")
            case.waits = True
        case "half":
            case.pieces, case.ending = [data], "half"
            case.done.append("half-closed")
        case ending:
            cut = rng.choice((len(data), rng.randrange(len(data) + 1)))
            case.pieces, case.ending = [data[:cut]], ending
            case.done.append(f"{ending} after {cut} of {len(data)}")
