"""What is wrong with a request is a 400 that names the parameter; the server is alive after it."""

import json
import time

import jsonschema_rs
import openai
import pytest

from support.e2e_harness import default_script, serving
from support.text import BOS, EOS, IM_END, byte_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]
VOCAB = 320
COMPLETION = {"model": "tiny", "prompt": "abc", "temperature": 0}
CHAT = {"model": "tiny", "messages": USER, "temperature": 0}


async def refused(tiny, path, body, param, *words, status=400, code=None):
    response = await tiny.http.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["code"] == code if code else isinstance(error["code"], str), error
    for word in words:
        assert word in error["message"], error
    assert (await tiny.http.get("/health")).status_code == 200


OUTSIDE = [-1, VOCAB, VOCAB + 1, 2**31, 2**63, 2**64, 10**30]


@pytest.mark.parametrize("token", OUTSIDE)
async def test_ids_outside_the_vocabulary_are_refused_everywhere(tiny, token):
    for body, param in [
        (COMPLETION | {"logit_bias": {str(token): 1}}, "logit_bias"),
        (COMPLETION | {"stop_token_ids": [5, token]}, "stop_token_ids"),
        (COMPLETION | {"prompt": [5, token]}, "prompt"),
        (COMPLETION | {"prompt": [[5], [token]]}, "prompt"),
    ]:
        await refused(tiny, "/v1/completions", body, param, str(token))
    for body, param in [
        (CHAT | {"logit_bias": {str(token): 1}}, "logit_bias"),
        (CHAT | {"stop_token_ids": [token]}, "stop_token_ids"),
    ]:
        await refused(tiny, "/v1/chat/completions", body, param, str(token))
    await refused(tiny, "/detokenize", {"tokens": [token]}, "tokens", str(token))


async def test_ids_beyond_the_tokenizer_but_inside_the_model_are_fine(tiny):
    answer = await tiny.openai.completions.create(
        model="tiny", prompt=[VOCAB - 1, 97], temperature=0, logit_bias={str(VOCAB - 1): 5}
    )
    assert answer.choices[0].text == "a"


async def test_a_token_that_the_tokenizer_has_and_the_model_lacks_is_refused_by_its_text():
    """As one that was added to the tokenizer while the embedding did not grow."""
    async with serving(default_script(vocab=IM_END, stop_id=EOS)) as small:
        prompt = COMPLETION | {"prompt": "a<|im_end|>b"}
        await refused(small, "/v1/completions", prompt, "prompt", "'<|im_end|>'", f"token {IM_END}")
        await refused(small, "/v1/chat/completions", CHAT, "messages", "'<|im_end|>'")
        for param, value in [
            ("prompt", [5, IM_END]),
            ("logit_bias", {str(IM_END): 1}),
            ("stop_token_ids", [IM_END]),
        ]:
            body = COMPLETION | {param: value}
            await refused(small, "/v1/completions", body, param, str(IM_END))
        assert (await small.post("/v1/completions", **COMPLETION)).status_code == 200
        found = await small.post("/tokenize", model="tiny", prompt="a<|im_end|>")
        assert found.json()["tokens"] == [97, IM_END]


PROMPTS = {
    "none": (None, "prompt"),
    "empty text": ("", "prompt"),
    "list of an empty text": ([""], "prompt"),
    "empty list": ([], "prompt"),
    "list of an empty list": ([[]], "prompt"),
    "number": (5, "prompt"),
    "list of null": ([None], "prompt"),
    "mixed": ([1, "a"], "prompt"),
    "booleans": ([True, False], "prompt"),
    "floats": ([1.5, 2.0], "prompt"),
    "deep": ([[[1]]], "prompt"),
    "object": ({"a": 1}, "prompt"),
    "too many": (["a"] * 1025, "prompt"),
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_prompts_that_are_none(tiny, name):
    prompt, param = PROMPTS[name]
    await refused(tiny, "/v1/completions", COMPLETION | {"prompt": prompt}, param)


NUMBERS = [
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -1, "at least"),
    ("max_tokens", 5.5, "integer"),
    ("max_tokens", "5", "integer"),
    ("max_tokens", True, "integer"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "at most 16"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", 101, "at most 100"),
    ("temperature", "hot", "number"),
    ("top_p", -0.1, "at least 0"),
    ("top_p", 1.5, "at most 1"),
    ("top_k", -2, "at least -1"),
    ("top_k", 2**63, "at most"),
    ("top_k", 10**30, "at most"),
    ("min_p", 2, "at most 1"),
    ("repetition_penalty", 0, "above 0"),
    ("frequency_penalty", 3, "at most 2"),
    ("presence_penalty", -3, "at least -2"),
    ("n", 0, "at least 1"),
    ("n", 129, "at most 128"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "at most 1024 entries"),
    ("stop_token_ids", [5] * 1025, "at most 1024 entries"),
    ("seed", 2**64, f"at most {2**64 - 1}"),
    ("seed", -(2**63) - 1, f"at least -{2**63}"),
    ("seed", 1.5, "integer"),
    ("logit_bias", {"5": 101}, "at most 100"),
    ("logit_bias", {"x": 1}, "integer"),
    ("logit_bias", [1], "object"),
    ("stop", ["a"] * 65, "at most 64 entries"),
    ("stop", "a" * 5000, "stop: at most 1024 characters"),
    ("stop", ["a" * 5000], "stop[0]: at most 1024 characters"),
    ("stop", ["a", 5], "stop[1]: input should be a valid string"),
    ("stop", 5, "string"),
    ("stream", "yes", "boolean"),
    ("cache_salt", "s" * 300, "at most 256"),
    ("ignore_eos", 1, "boolean"),
    ("timeout", 0, "above 0"),
    ("timeout", -1.5, "above 0"),
    ("timeout", "5s", "number"),
]


@pytest.mark.parametrize(
    ("param", "value", "words"), NUMBERS, ids=[f"{p}={str(v)[:20]}" for p, v, _ in NUMBERS]
)
async def test_values_out_of_range_name_the_parameter(tiny, param, value, words):
    await refused(tiny, "/v1/completions", COMPLETION | {param: value}, param, words)
    await refused(tiny, "/v1/chat/completions", CHAT | {"max_tokens": 16, param: value}, param)


@pytest.mark.parametrize("count", [-1, 21, 2**65])
async def test_too_many_alternatives(tiny, count):
    await refused(tiny, "/v1/completions", COMPLETION | {"logprobs": count}, "logprobs")
    body = CHAT | {"logprobs": True, "top_logprobs": count}
    await refused(tiny, "/v1/chat/completions", body, "top_logprobs")
    await refused(
        tiny, "/v1/chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs", "logprobs=true"
    )
    await refused(tiny, "/v1/chat/completions", CHAT | {"logprobs": 2}, "logprobs")


async def test_a_prompt_beyond_the_context_is_refused_in_words_that_clients_know(tiny):
    """LiteLLM looks for the first sentence, LangChain for the code or "prompt is too long"."""
    answer = await tiny.post("/v1/completions", **COMPLETION | {"prompt": [97] * 511})
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    words = (
        "This model's maximum context length is 512 tokens. However, the prompt is too long: it "
    )
    room = ", and at least one more is for the answer."
    chat = CHAT | {"messages": [{"role": "user", "content": "a" * 600}]}
    for path, body, param, has in [
        ("/v1/completions", COMPLETION | {"prompt": [97] * 512}, "prompt", "has 512 tokens"),
        ("/v1/completions", COMPLETION | {"prompt": "a" * 513}, "prompt", "has 513 tokens"),
        (
            "/v1/completions",
            COMPLETION | {"prompt": "a" * 20_000},
            "prompt",
            "has 20000 characters",
        ),
        ("/v1/chat/completions", chat, "messages", "has 619 tokens"),
    ]:
        text = f"{words}{has}{room if 'tokens' in has else '.'}"
        for more in ({}, {"stream": True}, {"max_tokens": 100_000}):
            response = await tiny.http.post(path, json=body | more)
            assert response.status_code == 400
            assert response.json()["error"] == {
                "message": text,
                "type": "invalid_request_error",
                "param": param,
                "code": "context_length_exceeded",
            }


async def test_null_means_not_sent(tiny):
    names = "max_tokens temperature top_p n stop seed logit_bias stream stream_options logprobs"
    body = {"model": "tiny", "prompt": "abc"} | dict.fromkeys(names.split())
    body |= {"whatever": None, "user": "me", "metadata": {"a": "b"}, "best_of": 1, "suffix": ""}
    assert (await tiny.post("/v1/completions", **body)).status_code == 200


CONTENTS = [
    ({"role": "assistant", "content": None}, None),
    ({"role": "assistant", "content": []}, None),
    ({"role": "assistant"}, None),
    ({"role": "assistant", "content": None, "tool_calls": []}, None),
    ({"role": "tool", "tool_call_id": "1"}, None),
    ({"role": "user", "content": []}, None),
    ({"role": "user", "content": ""}, None),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        None,
    ),
    ({"role": "user", "content": None}, "messages[1].content"),
    ({"role": "user"}, "messages[1].content"),
    ({"role": "system", "content": None}, "messages[1].content"),
    ({"role": "user", "content": 5}, "messages[1].content"),
    ({"role": "user", "content": {"text": "a"}}, "messages[1].content"),
    ({"role": "user", "content": ["a"]}, "messages[1].content[0]"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0]"),
    ({"role": "king", "content": "a"}, "messages[1].role"),
    ({"content": "a"}, "messages[1].role"),
    ({"role": None, "content": "a"}, "messages[1].role"),
    ({"role": ["user"], "content": "a"}, "messages[1].role"),
    ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls"),
    ({"role": "assistant", "tool_calls": [5]}, "messages[1].tool_calls[0].function"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, None),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, None),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"role": "user", "content": "a", "prefix": True}, "messages[1].prefix"),
]


@pytest.mark.parametrize(("message", "param"), CONTENTS, ids=[str(m)[:60] for m, _ in CONTENTS])
async def test_messages_are_kept_or_refused_with_their_place(tiny, message, param):
    body = CHAT | {"messages": [*USER, message]}
    if param is not None:
        await refused(tiny, "/v1/chat/completions", body, param)
        return
    assert (await tiny.post("/v1/chat/completions", **body)).status_code == 200
    shown = (await tiny.post("/tokenize", messages=body["messages"])).json()["tokens"]
    text = (await tiny.post("/detokenize", tokens=shown)).json()["prompt"]
    assert f"<|im_start|>{message['role']}\n" in text
    assert "None" not in text


@pytest.mark.parametrize("messages", [None, [], "hi", [5], {"role": "user"}])
async def test_messages_that_are_none(tiny, messages):
    body = {"model": "tiny"} | ({} if messages is None else {"messages": messages})
    await refused(tiny, "/v1/chat/completions", body, "messages")


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def with_type(**fields):
    return {"response_format": fields}


def shown_tools(*tools):
    return {"tools": [*tools], "tool_choice": "none"}


def tool(**fields):
    return shown_tools({"type": "function", "function": {"name": "f"} | fields})


SCHEMA = {"name": "x", "schema": {}}
UNSUPPORTED = [
    (with_type(type="json_schema", json_schema=SCHEMA), "response_format", "json_schema"),
    (with_type(json_schema=SCHEMA, type="json_schema"), "response_format", "json_schema"),
    (with_type(type="json_object"), "response_format", "not supported yet"),
    ({"tools": TOOLS}, "tools", "tool_choice='none'"),
    ({"tools": [{"type": "web_search"}]}, "tools", "leave out tools"),
    ({"tools": [{"type": "mcp", "server_label": "m"}]}, "tools", "leave out tools"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice", "tool_choice='none'"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "tool_choice='none'"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "tool"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs", "not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"n": 2, "best_of": 3}, "best_of", "not supported"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
    ({"regex": "a*"}, "regex", "not supported"),
]
UNKNOWN = [
    ({"max_token": 5}, "max_token", "unknown parameter 'max_token'; did you mean max_tokens?"),
    ({"nonsense": 5}, "nonsense", "unknown parameter"),
    ({"stream_options": {"nonsense": 5}}, "stream_options.nonsense", "'nonsense'"),
    (
        {"stream_options": {"include_use": True}},
        "stream_options.include_use",
        "did you mean include_usage?",
    ),
    (with_type(type="text", schema={}), "response_format.schema", "unknown parameter"),
    (tool(nonsense=5), "tools[0].function.nonsense", "unknown parameter"),
    (shown_tools({"function": {"name": "f"}, "x": 1}), "tools[0].x", "unknown parameter"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
        "tool_choice.function.x",
        "unknown parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
        "messages[0].content[0].x",
        "unknown parameter",
    ),
]
INVALID = [
    (with_type(), "response_format.type", "is required"),
    (with_type(json_schema=SCHEMA), "response_format.type", "is required"),
    (with_type(schema={}), "response_format.type", "is required"),
    (with_type(Type="json_object"), "response_format.type", "is required"),
    (with_type(type=5), "response_format.type", "'text'"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
    ({"stream_options": 5}, "stream_options", "object"),
    (shown_tools(5), "tools", "object"),
    (shown_tools({"type": "function"}), "tools[0].function", "is required"),
    (tool(name=5), "tools[0].function.name", "string"),
    (tool(parameters="x"), "tools[0].function.parameters", "object"),
    (shown_tools({"type": "web", "function": {"name": "f"}}), "tools[0].type", "'function'"),
    ({"tool_choice": "some"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tool_choice": {"function": {}}}, "tool_choice.function.name", "is required"),
    ({"reasoning_effort": "hihg"}, "reasoning_effort", "'none', 'minimal', 'low'"),
    ({"reasoning_effort": 5}, "reasoning_effort", "'none', 'minimal', 'low'"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not set"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [5]}, "messages", "messages[0]: input should be an object"),
]


@pytest.mark.parametrize(
    ("code", "extra", "param", "words"),
    [
        *(("unsupported_parameter", *case) for case in UNSUPPORTED),
        *(("unknown_parameter", *case) for case in UNKNOWN),
        *(("invalid_request", *case) for case in INVALID),
    ],
)
async def test_what_cannot_be_honoured_is_refused_with_its_code_at_every_depth(
    tiny, code, extra, param, words
):
    await refused(tiny, "/v1/chat/completions", CHAT | extra, param, words, code=code)


async def test_a_chat_with_tools_is_refused_with_the_option_that_lets_the_model_see_them(tiny):
    """What Open WebUI sends when a tool is switched on; the option that the text names works."""
    body = {"stream": True, "model": "tiny", "messages": USER, "tools": TOOLS}
    body |= {"tool_choice": "auto", "stream_options": {"include_usage": True}}
    words = "leave out tools, or send tool_choice='none', with which the model sees the tools"
    await refused(tiny, "/v1/chat/completions", body, "tool_choice", words)
    answer = await tiny.post("/v1/chat/completions", **body | {"tool_choice": "none"})
    assert answer.status_code == 200
    ids = (await tiny.post("/tokenize", messages=USER, tools=TOOLS)).json()["tokens"]
    assert json.dumps(TOOLS[0]) in (await tiny.post("/detokenize", tokens=ids)).json()["prompt"]


async def test_a_history_of_tool_calls_and_developer_messages_is_in_the_prompt(tiny):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "not json"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "failed"},
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
    assert (await tiny.post("/v1/chat/completions", **body)).status_code == 200
    ids = (await tiny.post("/tokenize", messages=messages)).json()["tokens"]
    assert (await tiny.post("/detokenize", tokens=ids)).json()["prompt"] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"id": "c1", "name": "f", "arguments": "not json"}\n'
        "</tool_call><|im_end|>\n<|im_start|>tool\nfailed<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_long_nonsense_is_refused_fast_and_in_few_words(tiny):
    long = "x" * 4_000_000
    for path, body in [
        ("/v1/completions", COMPLETION | {long: 1}),
        ("/v1/completions", COMPLETION | {"model": long}),
        ("/v1/completions", COMPLETION | {"prompt": [long, {"a": long}]}),
        ("/v1/completions", COMPLETION | {"prompt": [["a", long]]}),
        ("/v1/completions", COMPLETION | {"stream_options": {long: 1}}),
        ("/v1/completions", COMPLETION | {"logit_bias": {long: 1}}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": long}]}),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": long}}),
    ]:
        start = time.monotonic()
        response = await tiny.http.post(path, json=body)
        assert response.status_code in (400, 404)
        assert len(response.content) < 1000
        assert time.monotonic() - start < 30  # a look at every pair of characters takes hours


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"5", b"null", b"\xff", b'"\\ud800"', b"[" * 100_000, b'{"a":' * 5000],
)
async def test_bodies_that_are_no_json_object(tiny, data):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = await tiny.http.post(path, content=data)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_models_and_paths_that_do_not_exist(tiny):
    await refused(tiny, "/v1/completions", COMPLETION | {"model": "gpt"}, "model", status=404)
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        await tiny.openai.chat.completions.create(model="gpt", messages=USER)
    assert (await tiny.http.get("/nowhere")).json()["error"]["message"].endswith("Not Found")
    response = await tiny.http.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_tokenize_takes_a_prompt_or_messages(tiny):
    await refused(tiny, "/tokenize", {}, "prompt")
    await refused(tiny, "/tokenize", {"prompt": "a", "messages": USER}, "prompt")
    await refused(tiny, "/tokenize", {"messages": []}, "messages")
    assert (await tiny.post("/tokenize", prompt="")).json()["tokens"] == []


async def test_a_template_that_refuses_is_a_400_and_one_that_is_missing_too():
    template = (
        "{{ raise_exception('no second message, please') if messages | length > 1 }}"
        "{{ messages[0].content }}"
    )
    async with serving(template=template) as server:
        await refused(
            server, "/v1/chat/completions", CHAT | {"messages": USER * 2}, "messages", "no second"
        )
        assert (await server.post("/v1/chat/completions", **CHAT)).status_code == 200
    async with serving(template=None) as server:
        await refused(server, "/v1/chat/completions", CHAT, "messages", "no chat template")
        await refused(server, "/tokenize", {"messages": USER}, "messages", "no chat template")
        assert (await server.post("/v1/completions", **COMPLETION)).status_code == 200


async def test_bos_once_in_chat_and_completions_and_never_in_ids(caplog):
    template = "{{ bos_token }}{{ messages[0].content }}"
    async with serving(tokenizer=byte_tokenizer(add_bos=True), template=template) as server:

        async def ids(**body):
            return (await server.post("/tokenize", **body)).json()["tokens"]

        assert await ids(messages=USER) == [BOS, *b"hi"]
        assert await ids(prompt="hi") == [BOS, *b"hi"]
        assert await ids(prompt="hi", add_special_tokens=False) == [*b"hi"]
        usage = (await server.post("/v1/completions", **COMPLETION | {"prompt": [104]})).json()
        assert usage["usage"]["prompt_tokens"] == 1
        assert "BOS" not in caplog.text
        assert await ids(prompt="<s>hi") == [BOS, BOS, *b"hi"]
        assert "two BOS" in caplog.text
        empty = await server.post("/v1/completions", **COMPLETION | {"prompt": ""})
        assert empty.status_code == 200  # BOS alone is a prompt
        echoed = COMPLETION | {"echo": True, "logprobs": 0, "max_tokens": 1}
        choice = (await server.post("/v1/completions", **echoed)).json()["choices"][0]
        assert choice["text"] == "abc"
        assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "c", "<s>"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]


async def body_schemas(tiny):
    """What the description says of the bodies of completions and chat completions."""
    paths = (await tiny.http.get("/openapi.json")).json()["paths"]
    schemas = [
        paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path in ("/v1/completions", "/v1/chat/completions")
    ]
    assert "$ref" not in json.dumps(schemas)
    return [jsonschema_rs.validator_for(schema) for schema in schemas]


async def test_the_description_refuses_what_the_server_refuses(tiny):
    """Except what depends on other fields, and messages, which have rules of their own."""
    completion, chat = await body_schemas(tiny)
    for param, value, _ in NUMBERS:
        if (param, value) == ("min_tokens", 17):
            continue
        if isinstance(value, int) and abs(value) > 2**53:  # the judge compares numbers as floats
            continue
        assert not chat.is_valid(CHAT | {param: value}), (param, value)
        if (param, value) != ("max_tokens", 0):  # which goes with `echo`
            assert not completion.is_valid(COMPLETION | {param: value}), (param, value)
    cases = [case for case in UNSUPPORTED if case[1] not in ("tools", "tool_choice", "best_of")]
    for extra, param, _ in (*cases, *UNKNOWN, *INVALID):
        if not param.startswith(("chat_template_kwargs", "messages[")):
            assert not chat.is_valid(CHAT | extra), extra
    for name in PROMPTS:
        if name not in ("empty text", "list of an empty text"):  # with a BOS they are prompts
            body = COMPLETION | {"prompt": PROMPTS[name][0]}
            assert not completion.is_valid(body), name


async def test_the_description_takes_what_the_server_takes(tiny):
    completion, chat = await body_schemas(tiny)
    taken = {"max_tokens": 5.0, "top_p": 0, "top_k": -1, "seed": -1, "stop": ["", "a"], "n": 2}
    taken |= {"best_of": 2, "logit_bias": {"5": 1}, "stream_options": {"include_obfuscation": True}}
    taken |= {"user": {"any": "thing"}, "suffix": "", "length_penalty": 1, "echo": None}
    for prompt in ("a", ["a", "b"], [97, 98], [[97], [98]]):
        body = COMPLETION | taken | {"prompt": prompt}
        assert (await tiny.post("/v1/completions", **body)).status_code == 200
        assert completion.is_valid(body)
    body = CHAT | taken | {"tools": TOOLS, "tool_choice": "none", "reasoning_effort": "none"}
    del body["echo"]
    assert (await tiny.post("/v1/chat/completions", **body)).status_code == 200
    assert chat.is_valid(body)


async def test_every_path_of_the_api_is_described_with_its_errors(tiny):
    paths = (await tiny.http.get("/openapi.json")).json()["paths"]
    always = {"200", "400", "401", "408", "431", "429", "500", "503"}
    of_bodies = {"404", "413", "415"}
    for path, statuses in [
        ("/v1/completions", always | of_bodies | {"504"}),
        ("/v1/chat/completions", always | of_bodies | {"504"}),
        ("/tokenize", always | of_bodies),
        ("/detokenize", always | of_bodies),
        ("/v1/models", always),
        ("/v1/models/{name}", always | {"404"}),
        ("/tokenizer_info", always),
        ("/health", always),
        ("/metrics", always),
    ]:
        (operation,) = paths[path].values()
        assert statuses <= set(operation["responses"]), path
        assert "422" not in operation["responses"]
    assert set(paths["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    streamed = paths["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(streamed) == {"application/json", "text/event-stream"}
    errors = paths["/v1/completions"]["post"]["responses"]["400"]["content"]["application/json"]
    error = (await tiny.post("/v1/completions", **COMPLETION, nonsense=1)).json()
    assert jsonschema_rs.validator_for(errors["schema"]).is_valid(error)
    assert (await tiny.http.get("/docs")).status_code == 404
