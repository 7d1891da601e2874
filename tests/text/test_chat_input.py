"""What a client sent is in the prompt, in a form that the template knows, or the request fails."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.errors import RequestError
from bifolio.text.chat_messages import read_messages
from support.text import CHATML, byte_tokenizer, chatml

TOKENIZER = byte_tokenizer()


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def developer(content):
    return {"role": "developer", "content": content}


def assistant(content, *calls, **fields):
    return {"role": "assistant", "content": content, "tool_calls": [*calls]} | fields


def call(arguments, name="weather", call_id="call_0123456789abcdef"):
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(content, call_id="call_0123456789abcdef"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

# Some ways of templates to go through messages, in as few words as possible.
LOOP = "{{% for m in messages %}}{body}{{% endfor %}}"
FIRST_SYSTEM = LOOP.format(
    body="{% if m.role == 'system' and loop.first %}S:{{ m.content }}\n"
    "{% elif m.role in ('user', 'assistant', 'tool') %}{{ m.role[0] }}:{{ m.content }}\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}[system]Be nice.\n{% endif %}" + LOOP.format(
    body="[{{ m.role }}]{{ m.content }}\n"
)
ONE_SYSTEM = LOOP.format(
    body="{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('system must be first') }}{% endif %}S:{{ m.content }}\n"
    "{% else %}{{ m.role[0] }}:{{ m.content }}\n{% endif %}"
)
NO_SYSTEM = LOOP.format(
    body="{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}\n"
)
DEVELOPER = LOOP.format(
    body="{{ {'developer': 'D', 'system': 'S', 'tool': 't'}.get(m.role, m.role[0]) }}"
    ":{{ m.content }}\n"
)
HERMES = "{% if tools %}T:{{ tools | tojson }}\n{% endif %}" + LOOP.format(
    body="{{ m.role[0] }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}{{ '\n' }}"
)
NULL_ONLY = LOOP.format(
    body="{% if m.content is none %}a:{% for c in m.tool_calls %}"
    "{{ '<' + c.function.name + ' ' + c.function.arguments + '>' }}{% endfor %}\n"
    "{% else %}{{ m.role[0] }}:{{ m.content }}\n{% endif %}"
)
ITEMS = LOOP.format(
    body="{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{% for key, value in c.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>"
    "{% endfor %}{{ '\n' }}"
)
SHORT_IDS = LOOP.format(
    body="{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('9') }}"
    "{% endif %}<{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}>{% else %}"
    "{{ m.role[0] }}:{{ m.tool_call_id }}:{{ m.content }}{% endfor %}\n"
)


def shown(template, messages, **options):
    return chatml(TOKENIZER, template).render(read_messages(messages), **options).plain


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (FIRST_SYSTEM, [developer("A"), user("B")], "S:A\nu:B\n"),
        (FIRST_SYSTEM, [system("A"), developer("B"), user("C")], "S:A\n\nB\nu:C\n"),
        (FIRST_SYSTEM, [developer("A"), system("B"), user("C")], "S:A\n\nB\nu:C\n"),
        (FIRST_SYSTEM, [user("A"), developer("B"), user("C")], "S:B\nu:A\nu:C\n"),
        (FIRST_SYSTEM, [system("A"), user("B"), developer("C")], "S:A\n\nC\nu:B\n"),
        (DEFAULT_SYSTEM, [developer("A"), user("B")], "[system]A\n[user]B\n"),
        (
            DEFAULT_SYSTEM,
            [system("A"), user("B"), developer("C")],
            "[system]A\n[user]B\n[system]C\n",
        ),
        (ONE_SYSTEM, [user("A"), developer("B"), user("C")], "S:B\nu:A\nu:C\n"),
        (NO_SYSTEM, [developer("A"), user("B")], "u:A\n\nB\n"),
        (DEVELOPER, [developer("A"), user("B"), developer("C")], "D:A\nu:B\nD:C\n"),
        (CHATML, [developer("A")], "<|im_start|>system\nA<|im_end|>\n"),
    ],
)
def test_a_developer_message_is_a_system_message_where_there_is_no_such_role(
    template, messages, prompt
):
    assert shown(template, messages, add_generation_prompt=False) == prompt


@pytest.mark.parametrize(
    ("template", "messages", "place"),
    [
        (FIRST_SYSTEM, [user("A"), system("B"), user("C")], "messages[1]"),
        (FIRST_SYSTEM, [system("A"), system("A"), user("C")], "messages[1]"),
        (FIRST_SYSTEM.replace(", 'assistant'", ""), [user("A"), assistant("B")], "messages[1]"),
        ("{% for m in messages[-2:] %}{{ m.content }}{% endfor %}", [user("A")] * 3, "messages[0]"),
        (
            LOOP.format(body="{{ m.content if 'x' not in m.content }}"),
            [user("A"), user("x")],
            "messages[1]",
        ),
    ],
)
def test_a_message_that_the_template_drops_is_refused_by_its_name(template, messages, place):
    with pytest.raises(RequestError, match="does not show this") as refused:
        shown(template, messages)
    assert refused.value.param == place
    at = int(place[9:-1])
    assert str(refused.value).startswith(place)
    assert f"this {messages[at]['role']} message" in str(refused.value)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ m.content.split('</think>')[-1] }}", "<think>why</think> so"),
        ("{{ m.content.split('<end>')[0] }}", "so<end>and on"),
        ("{{ m.content | trim }}", " \n so \n"),
        ("{{ m.content | lower }}", "So"),
        ("{{ m.content | replace('y', 'Y') }}", "say"),
        ("{{ m.content if m.content | trim }}", " "),
        ("{{ m.content if m.content }}", ""),
        ("{% for line in m.content.split('\n') %}> {{ line }}\n{% endfor %}", "s\no"),
        ("{{ m.content | tojson }}{{ [m.content] }}", 'a "quote"\n'),
        ("{{ m.content | tojson(ensure_ascii=True) }}", "žltý"),
        (
            "{{ '<tool_response>' in m.content }}{{ m.content }}",
            "<tool_response>so</tool_response>",
        ),
    ],
)
def test_what_a_template_makes_of_a_text_is_not_taken_for_dropping_it(template, content):
    body = LOOP.format(body=template)
    talk = [user("hi"), {"role": "assistant", "content": content}, user(content), user("ho")]
    assert shown(body, talk) == plain_jinja(body, talk)


def plain_jinja(template, messages):
    import transformers

    original = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER._backend)
    return original.apply_chat_template(messages, chat_template=template, tokenize=False)


def test_old_reasoning_may_be_dropped_and_the_text_beside_a_call_too():
    reasoning = assistant("so", reasoning_content="why")
    assert shown(CHATML, [user("A"), reasoning], add_generation_prompt=False).count("why") == 0
    only_calls = LOOP.format(
        body="{{ m.role[0] }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}"
        "{{ m.content }}{% endif %}"
    )
    text = shown(only_calls, [user("A"), assistant("Let me see", call('{"city": "Paris"}'))])
    assert '"city": "Paris"' in text
    assert "Let me see" not in text


TALK = [
    user("Weather?"),
    assistant(None, call('{"city": "Paris"}')),
    result("18 degrees"),
    user("Thanks"),
]


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize(
    ("template", "called"),
    [
        (HERMES, 'a:<weather {"city": "Paris"}>'),
        (NULL_ONLY, 'a:<weather {"city": "Paris"}>'),
        (ITEMS, "a:<weather city=Paris>"),
        (SHORT_IDS, '<51bc4d8a7 weather {"city": "Paris"}>'),
    ],
)
def test_calls_reach_the_template_in_the_form_that_it_takes(template, called, content):
    """Null or empty content, an object or its text as arguments, ids of nine characters."""
    talk = [TALK[0], TALK[1] | {"content": content}, *TALK[2:]]
    prompt = shown(template, talk)
    if template is SHORT_IDS:
        call_id = prompt.split("<")[1].split(" ")[0]
        assert call_id.isalnum()
        called = called.replace("51bc4d8a7", call_id)
        assert f"t:{call_id}:18 degrees" in prompt
    assert called in prompt
    assert "tool_call>" not in prompt


AS_TEXT = (
    "<tool_call>\n"
    '{"id": "call_0123456789abcdef", "name": "weather", "arguments": {"city": "Paris"}}\n'
    "</tool_call>"
)


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, FIRST_SYSTEM, NO_SYSTEM, DEVELOPER])
@pytest.mark.parametrize("content", [None, "", "Let me see"])
def test_a_template_without_a_form_for_calls_and_tools_shows_them_as_text(template, content):
    talk = [TALK[0], TALK[1] | {"content": content}, *TALK[2:]]
    prompt = shown(template, talk, tools=[TOOL])
    assert (f"{content}\n{AS_TEXT}" if content else AS_TEXT) in prompt
    assert json.dumps(TOOL) in prompt
    assert "18 degrees" in prompt
    assert "None" not in prompt


def test_results_and_calls_become_turns_where_only_turns_are_taken():
    assert shown(NO_SYSTEM, TALK) == (
        f"u:Weather?\na:{AS_TEXT}\nu:<tool_response>\n"
        '{"tool_call_id": "call_0123456789abcdef", "content": "18 degrees"}\n</tool_response>\n\n'
        "Thanks\n"
    )


def test_a_call_that_only_its_content_hides_is_shown_as_text_and_the_others_are_not():
    talk = [*TALK, assistant("Again", call('{"city": "Rome"}')), result("28 degrees")]
    prompt = shown(NULL_ONLY, talk)
    assert 'a:<weather {"city": "Paris"}>' in prompt
    assert '"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt


BROKEN = ["", '"Paris"', "not json", '{"city": ', "[1]", "[" * 10_000, '{"a": "\\ud800"}']
BROKEN += ['{"a":' * 300 + "1" + "}" * 300]


@pytest.mark.parametrize("arguments", BROKEN)
@pytest.mark.parametrize("template", [HERMES, NULL_ONLY, ITEMS, SHORT_IDS, CHATML, FIRST_SYSTEM])
def test_arguments_that_are_no_object_stay_in_the_history_as_they_are(template, arguments):
    talk = [TALK[0], assistant(None, call(arguments)), *TALK[2:], *TALK[1:]]
    prompt = shown(template, talk)
    told = json.dumps(arguments)[1:-1]
    assert prompt.count("weather") == 2
    assert arguments in prompt or told in prompt
    assert "Paris" in prompt.replace(told, "", 1)
    prompt.encode()


def test_a_call_without_arguments_is_shown_by_its_name():
    assert "<weather {}>" in shown(HERMES, [user("A"), assistant(None, call("{}"))])
    dropped = HERMES.replace("c.function.name", "'f'")
    assert '"name": "weather"' in shown(dropped, [user("A"), assistant(None, call("{}"))])


def test_every_one_of_several_calls_is_shown():
    first_only = HERMES.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    talk = [user("A"), assistant(None, call('{"a": 1}', "f"), call('{"b": 2}', "g"))]
    prompt = shown(first_only, talk)
    assert '"name": "f", "arguments": {"a": 1}' in prompt
    assert '"name": "g", "arguments": {"b": 2}' in prompt
    one = HERMES.replace(
        "{% for c", "{{ raise_exception('one') if (m.tool_calls or []) | length > 1 }}{% for c"
    )
    text = shown(one, talk, tools=[TOOL])
    assert '"name": "g", "arguments": {"b": 2}' in text
    assert text.startswith("T:[")  # only the calls are set as text


def test_the_older_forms_of_the_api_are_read():
    talk = [
        user("A"),
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": '{"a": 1}'},
        },
        {"role": "function", "name": "f", "content": "18"},
        {"role": "assistant", "content": None, "refusal": "I will not"},
    ]
    assert shown(HERMES, talk) == 'u:A\na:<f {"a": 1}>\nt:18\na:I will not\n'


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (user("A") | {"prefix": True}, "messages[0].prefix"),
        (user("A") | {"files": ["x"]}, "messages[0].files"),
        (user("A") | {"type": "image"}, "messages[0].type"),
        (user("A") | {"type": ["text"]}, "messages[0].type"),
        (user("A") | {"tool_calls": [call("{}")]}, "messages[0].tool_calls"),
        (assistant(None, call([1])), "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_a_field_of_a_message_that_means_nothing_here_is_refused(message, place):
    with pytest.raises(RequestError) as refused:
        shown(CHATML, [message])
    assert refused.value.param == place


def test_fields_that_say_nothing_or_that_the_template_knows_are_taken():
    silent = {"name": "x", "audio": None, "files": [], "reasoning_content": "w", "annotations": [1]}
    assert "A" in shown(CHATML, [user("A") | silent])
    for kind in ("text", "message"):  # of lm-evaluation-harness, and of the Responses API
        assert "A" in shown(CHATML, [user("A") | {"type": kind}])
    assert (
        shown("{{ messages[0].mood }}{{ messages[0].content }}", [user("A") | {"mood": "x"}])
        == "xA"
    )


MESSAGES = st.lists(
    st.one_of(
        st.builds(system, st.text(max_size=3)),
        st.builds(developer, st.text(max_size=3)),
        st.builds(user, st.text("aA<>|\n ", max_size=5)),
        st.builds(assistant, st.text("aA<>|\n ", max_size=5)),
        st.builds(lambda a: assistant(None, call(a)), st.sampled_from(["{}", '{"a": 1}', "x", ""])),
        st.builds(result, st.text("aA<>|\n ", max_size=5)),
    ),
    min_size=1,
    max_size=4,
)
TEMPLATES = [CHATML, FIRST_SYSTEM, DEFAULT_SYSTEM, NO_SYSTEM, DEVELOPER, HERMES, NULL_ONLY, ITEMS]
COMPILED = [chatml(TOKENIZER, template) for template in TEMPLATES]


@settings(deadline=None, max_examples=60)
@given(MESSAGES, st.booleans())
def test_every_text_of_a_conversation_is_in_the_prompt_or_the_request_is_refused(messages, tools):
    for template in COMPILED:
        try:
            prompt = template.render(read_messages(messages), tools=[TOOL] if tools else None).plain
        except RequestError:
            continue
        for message in messages:
            content = message["content"] or ""
            assert content.strip() in prompt or json.dumps(content)[1:-1] in prompt
            assert not message.get("tool_calls") or "weather" in prompt
        assert not tools or '"parameters"' in prompt
