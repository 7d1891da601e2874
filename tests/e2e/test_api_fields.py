"""What each field of a body means: honoured, or ignored because it changes no token."""

import json

import httpx
import pytest

from bifolio.errors import RequestError
from bifolio.request import SamplingParams
from bifolio.server.error_responses import ErrorResponse
from bifolio.server.request_bodies import ChatBody, CompletionBody, parse_body
from support.e2e_harness import serving
from support.text import byte_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "abcdefghijklmnopqrstuvw"
COMPLETION = {"model": "tiny", "prompt": PROMPT, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
IGNORED = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "a"},
    "request_id": "r",
    "rid": "r",
    "session_id": "s",
    "stream_interval": 5,
    "best_of": 1,
    "suffix": "",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "modalities": ["text"],
    "verbosity": "medium",
    "priority": 0,
    "include_reasoning": True,
    "stop": "",
    "response_format": {"type": "text"},
    "stream_options": {"include_obfuscation": True},
    "nonsense": None,
}


def choices(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"]


@pytest.mark.parametrize("field", IGNORED)
async def test_a_field_that_changes_no_token_is_taken_and_changes_nothing(tiny, field):
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        plain = choices(await tiny.post(path, **body))
        assert choices(await tiny.post(path, **body, **{field: IGNORED[field]})) == plain


async def test_best_of_may_be_as_large_as_n(tiny):
    assert len(choices(await tiny.post("/v1/completions", **COMPLETION, n=3, best_of=3))) == 3


async def test_an_empty_stop_string_stops_nothing(tiny):
    for stop, text in [("", PROMPT[:16]), ([""], PROMPT[:16]), (["", "d", ""], "abc")]:
        (choice,) = choices(await tiny.post("/v1/completions", **COMPLETION, stop=stop))
        assert choice["text"] == text


async def test_a_number_without_a_fraction_is_an_integer(tiny):
    floats = {"max_tokens": 5.0, "n": 2.0, "seed": 3.0, "top_k": 4.0, "min_tokens": 1.0}
    floats |= {"logprobs": 1.0, "stop_token_ids": [110.0, 111]}
    ints = json.loads(json.dumps(floats).replace(".0", ""))
    given = [choices(await tiny.post("/v1/completions", **COMPLETION, **f)) for f in (floats, ints)]
    assert given[0] == given[1]
    assert len(given[0][0]["logprobs"]["tokens"]) == 5
    for prompt in ([97.0, 98], [[97.0, 98.0]]):
        (choice,) = choices(await tiny.post("/v1/completions", **COMPLETION | {"prompt": prompt}))
        assert choice["text"] == "ab"
    back = await tiny.post("/detokenize", tokens=[104.0, 105.0])
    assert back.json() == {"prompt": "hi"}
    chat = CHAT | {"max_completion_tokens": 3.0, "logprobs": True, "top_logprobs": 2.0}
    (choice,) = choices(await tiny.post("/v1/chat/completions", **chat))
    assert len(choice["logprobs"]["content"]) == 3


async def test_a_seed_of_minus_one_is_a_new_one_for_each_request(tiny):
    """With a temperature the scripted engine begins at the seed modulo the length, here 23."""
    body = COMPLETION | {"temperature": 1, "max_tokens": 23}
    drawn = [choices(await tiny.post("/v1/completions", **body, seed=-1)) for _ in range(12)]
    assert len({choice["text"] for (choice,) in drawn}) > 1  # all alike by chance: 1e-15
    for seed in (-2, 5):
        fixed = [choices(await tiny.post("/v1/completions", **body, seed=seed)) for _ in range(2)]
        assert fixed[0] == fixed[1]


async def test_top_p_zero_is_taken(tiny):
    for top_p in (0, 0.0):
        body = COMPLETION | {"top_p": top_p, "temperature": 1, "seed": 0}
        assert choices(await tiny.post("/v1/completions", **body))[0]["text"] == PROMPT[:16]


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_beyond_the_room_ends_at_the_context_and_usage_says_so(tiny, stream):
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    room = 512 - len(PROMPT)
    for field, wanted, clamped in [
        ("max_tokens", room, None),
        ("max_tokens", room + 1, room),
        ("max_tokens", 2**70, room),
    ]:
        body = COMPLETION | {"ignore_eos": True, field: wanted} | options
        response = await tiny.post("/v1/completions", **body)
        events = response.text.splitlines() if stream else ["data: " + response.text]
        answers = [json.loads(e[6:]) for e in events if e.startswith("data: {")]
        usage = answers[-1]["usage"]
        assert usage["completion_tokens"] == room
        assert usage.get("max_tokens_clamped_to") == clamped
        ends = [c["finish_reason"] for answer in answers for c in answer["choices"]]
        assert ends[-1] == "length"
    chat = CHAT | {"max_tokens": 5, "max_completion_tokens": 5000}
    answer = (await tiny.post("/v1/chat/completions", **chat)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["max_tokens_clamped_to"] == 512 - answer["usage"]["prompt_tokens"]
    plain = (await tiny.post("/v1/chat/completions", **CHAT)).json()
    assert "max_tokens_clamped_to" not in plain["usage"]  # nobody asked for more
    several = COMPLETION | {"prompt": ["a", "ab" * 20], "max_tokens": 500}
    usage = (await tiny.post("/v1/completions", **several)).json()["usage"]
    assert usage["max_tokens_clamped_to"] == 512 - 40


async def test_reasoning_effort_reaches_a_template_that_reads_it():
    template = "{{ messages[0].content }}:{{ reasoning_effort }}:{{ enable_thinking }}:{{ other }}"
    async with serving(template=template) as server:

        async def prompt(**fields):
            body = {"messages": [{"role": "user", "content": "a"}]} | fields
            tokens = (await server.post("/tokenize", **body)).json()["tokens"]
            answer = await server.post("/v1/chat/completions", **body, temperature=0, max_tokens=60)
            assert choices(answer)[0]["message"]["content"] == bytes(tokens).decode()
            return bytes(tokens).decode()

        assert await prompt() == "a:::"
        assert await prompt(reasoning_effort="high") == "a:high:True:"
        assert await prompt(reasoning_effort="none") == "a:none:False:"
        given = {"enable_thinking": True, "other": 1}
        assert await prompt(chat_template_kwargs=given) == "a::True:1"
        assert await prompt(reasoning_effort="none", chat_template_kwargs=given) == "a:none:True:1"


async def test_the_models_own_sampling_counts_where_a_request_leaves_a_field_out():
    recommended = SamplingParams(temperature=0.0, top_k=3, repetition_penalty=1.5)
    async with serving(sampling=recommended) as server:
        for url in ("/v1/models", "/v1/models/tiny"):
            card = (await server.http.get(url)).json()
            assert card.get("data", [card])[0]["default_sampling"] == {
                "temperature": 0.0,
                "top_k": 3,
                "top_p": 1.0,
                "min_p": 0.0,
                "repetition_penalty": 1.5,
            }
        body = {"prompt": PROMPT, "seed": 5}
        assert choices(await server.post("/v1/completions", **body))[0]["text"] == PROMPT[:16]
        sampled = choices(await server.post("/v1/completions", **body, temperature=1))[0]
        assert sampled["text"] == PROMPT[5:21]
    for kind, fields in ((CompletionBody, {"prompt": "a"}), (ChatBody, {"messages": [{}]})):
        ask = {"max_tokens": 1, "logprobs": None}
        left_out = kind(**fields).sampling(recommended, **ask)
        assert (left_out.temperature, left_out.top_k, left_out.repetition_penalty) == (0, 3, 1.5)
        sent = kind(**fields, temperature=0.5, top_k=-1, repetition_penalty=1.0)
        sampling = sent.sampling(recommended, **ask)
        assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.5, 0, 1)


async def test_a_slash_at_the_end_of_a_path_changes_nothing(tiny):
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/version"):
        plain, slashed = [await tiny.http.get(path + end) for end in ("", "/")]
        assert (plain.status_code, plain.text) == (slashed.status_code, slashed.text)
    (choice,) = choices(await tiny.post("/v1/completions/", **COMPLETION))
    assert choice["text"] == PROMPT[:16]
    async with serving(api_keys=("k",)) as server:
        assert (await server.http.get("/v1/models/")).status_code == 401
        assert (await server.http.get("/health/")).status_code == 200


@pytest.mark.parametrize("template", ["", None])
async def test_tokenizer_info_says_what_clients_need_to_render_and_count(template):
    """The fields and calls are those of lm-evaluation-harness' remote tokenizer."""
    async with serving(template=template, tokenizer=byte_tokenizer(add_bos=True)) as server:
        info = (await server.http.get("/tokenizer_info")).json()
        chat_template = info.pop("chat_template")
        assert ("im_start" in chat_template) if template == "" else chat_template is None
        assert info == {
            "bos_token": "<s>",
            "eos_token": "<|im_end|>",
            "unk_token": None,
            "pad_token": None,
            "model_max_length": 512,
            "vocab_size": 261,
        }
        for text in (info["bos_token"], info["eos_token"]):
            body = {"prompt": text, "add_special_tokens": False}
            (token,) = (await server.post("/tokenize", **body)).json()["tokens"]
            assert (await server.post("/detokenize", tokens=[token])).json() == {"prompt": text}


async def test_each_error_has_a_code(tiny):
    async def code(response):
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return response.status_code, error["code"]

    http = tiny.http
    assert await code(await http.get("/nowhere")) == (404, "not_found")
    assert await code(await http.get("/v1/models/x")) == (404, "model_not_found")
    assert await code(await http.get("/v1/completions")) == (405, "method_not_allowed")
    assert await code(await http.post("/v1/completions", content=b"{")) == (400, "invalid_request")
    bad = COMPLETION | {"temperature": 200}
    assert await code(await tiny.post("/v1/completions", **bad)) == (400, "invalid_request")
    long = await http.post("/v1/completions", content=b" " * (8 * 2**20 + 1))
    assert await code(long) == (413, "request_too_large")
    for status in (400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503, 504):
        assert ErrorResponse(status, "kind", "text").body()["error"]["code"], status


async def test_what_a_client_sent_is_cut_wherever_it_is_shown(tiny):
    digits, long = "1" * 4000, "x" * 5000
    template = "{{ raise_exception('no ' + messages[0].content) if messages | length == 2 }}"
    user = [{"role": "user", "content": long}]
    async with serving(template=template + "{{ messages[0].content }}") as server:
        refused = await server.post("/v1/chat/completions", messages=user * 2)
        assert (refused.status_code, len(refused.content) < 1300) == (400, True)
    for method, path, body in [
        ("POST", "/v1/completions", {"logit_bias": {digits: 1}}),
        ("POST", "/v1/completions", {"logit_bias": {long: 1}}),
        ("POST", "/v1/completions", {"stop_token_ids": [int(digits)]}),
        ("POST", "/v1/completions", {"prompt": [int(digits)]}),
        ("POST", "/v1/completions", {"prompt": [long, 5]}),
        ("POST", "/v1/completions", {"n": int(digits)}),
        ("POST", "/v1/completions", {"seed": int(digits)}),
        ("POST", "/v1/completions", {"max_tokens": -int(digits)}),
        ("POST", "/v1/completions", {"timeout": -1e308}),
        ("POST", "/v1/completions", {"model": long}),
        ("POST", "/v1/completions", {long: 1}),
        ("POST", "/v1/completions", {"stream_options": {long: 1}}),
        ("POST", "/v1/completions", {"response_format": {"type": long}}),
        ("POST", "/v1/chat/completions", {"messages": user, "reasoning_effort": long}),
        ("POST", "/v1/chat/completions", {"messages": user, "tool_choice": long}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": long, "content": "a"}]}),
        ("POST", "/detokenize", {"tokens": [int(digits)]}),
        ("GET", f"/v1/models/{long}", None),
        ("GET", f"/{long}", None),
        ("X" * 500, "/health", None),
    ]:
        base = COMPLETION if path == "/v1/completions" else {}
        json_body = None if body is None else base | body
        try:
            response = await tiny.http.request(method, path, json=json_body)
        except httpx.RemoteProtocolError:
            assert len(method) > 50  # the parser knows no such method
            continue
        assert 400 <= response.status_code < 500
        assert len(response.content) < 400, response.text
    assert (await tiny.http.get("/health")).status_code == 200


async def test_a_body_with_a_million_mistakes_names_the_first():
    """The others are not even looked at, which would take the server seconds."""
    many = 200_000
    for field, value, param in [
        ("stop_token_ids", ["a"] * many, "stop_token_ids"),
        ("stop", [5] * many, "stop"),
        ("messages", [5] * many, "messages"),
        ("tools", [5] * many, "tools"),
        ("logit_bias", {f"x{i}": "y" for i in range(many)}, "logit_bias"),
    ]:
        kind = ChatBody if field in ("messages", "tools") else CompletionBody
        body = {"prompt": "a"} if kind is CompletionBody else {"messages": [{}]}
        with pytest.raises(RequestError) as refused:
            parse_body(kind, json.dumps(body | {field: value}).encode())
        assert refused.value.param == param
