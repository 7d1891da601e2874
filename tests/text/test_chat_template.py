"""Templates render as in `transformers`; sources, errors, continued messages, the end of a turn."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from bifolio.errors import CheckpointError, ConfigError, RequestError
from bifolio.text.chat_template import ChatTemplate, TemplateSource
from bifolio.text.tokenizer_files import load_text_side
from support.text import BOS, CHATML, EOS, IM_END, byte_backend, byte_tokenizer, chatml

TOKENIZER = byte_tokenizer()
USER = [{"role": "user", "content": "hi"}]

TEMPLATES = {
    "chatml": CHATML,
    "trims and breaks": (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 4 %}{% break %}{% endif %}"
        "[{{ m.role | upper }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    ),
    "namespace and tools": (
        "{% set ns = namespace(n=0) %}{% if tools %}{{ tools | tojson }}\n{% endif %}"
        "{%- for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}|{{ ns.n }}{% endfor -%}  "
    ),
    "indented tools": (
        "{% for t in tools or [] %}{{ t | tojson(indent=2) }}{% endfor %}"
        "{{ messages | map(attribute='content') | join('<br>') }}"
    ),
    "tools as Python": "{{ tools }}{% for m in messages %}{{ m.content.replace('<', '&lt;') }}"
    "{% endfor %}",
}

TALK = [
    {"role": "system", "content": "  Be brief. <b>&\"'"},
    {"role": "user", "content": "Ahoj, ako sa máš?\n"},
    {"role": "assistant", "content": " Dobre. "},
    {"role": "user", "content": "😀 <|im_end|> <think> \ue000"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "žltý <x>", "p": [1, None]}}]


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        *((name, None) for name in TEMPLATES),
        ("namespace and tools", TOOLS),
        ("indented tools", TOOLS),
        ("tools as Python", TOOLS),
    ],
)
@pytest.mark.parametrize("generation", [True, False])
def test_rendering_equals_transformers(name, tools, generation):
    original = PreTrainedTokenizerFast(
        tokenizer_object=byte_backend(), bos_token="<s>", eos_token="<|im_end|>"
    )
    expected = original.apply_chat_template(
        TALK,
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=generation,
        tokenize=False,
    )
    found = chatml(TOKENIZER, TEMPLATES[name]).render(
        TALK, tools=tools, add_generation_prompt=generation
    )
    assert found.plain == expected


def test_a_template_that_writes_bos_gives_exactly_one():
    tokenizer = byte_tokenizer(add_bos=True)
    prompt = chatml(tokenizer, "{{ bos_token }}" + CHATML).render(USER)
    assert tokenizer.encode(prompt.text, guard=prompt.guard).count(BOS) == 1


def test_what_a_template_refuses_is_an_error_of_the_request():
    template = "{{ raise_exception('roles must alternate') if messages | length > 1 }}" + CHATML
    with pytest.raises(RequestError, match="roles must alternate") as refused:
        chatml(TOKENIZER, template).render(USER * 2)
    assert refused.value.param == "messages"
    fails = CHATML + "{{ 1 // (2 - messages | length) }}"
    with pytest.raises(RequestError, match="fails on these messages"):
        chatml(TOKENIZER, fails).render(USER * 2)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(attack):
    template = chatml(TOKENIZER, "{% if messages|length > 1 %}" + attack + "{% endif %}" + CHATML)
    with pytest.raises(RequestError, match="refuses these messages"):
        template.render(USER * 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for %}", "does not compile"),
        ("{% if x %}", "does not compile"),
        ("nothing", "does not show a plain user message"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages[0].content.nope() }}", "does not show"),
    ],
)
def test_a_broken_template_is_an_error_of_the_start(text, words):
    with pytest.raises(ConfigError, match=words) as error:
        chatml(TOKENIZER, text)
    assert "the test" in str(error.value)


def test_a_template_that_goes_through_parts_gets_parts():
    template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}"
    )
    talk = [*USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "yo"}]
    assert chatml(TOKENIZER, template).render(talk).plain == "hi;;yo;"


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "<think>\n\n</think>\n\n{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
ONE_CHARACTER = [
    *map(chr, range(0x20, 0x7F)),
    *"\t\n\r\x0b\x0c\x1c\x85\xa0\u2028\u3000",
    *"žß€😀\ue000ꀀ",
]
CUTS = {
    CHATML: lambda text: text,
    CHATML.replace("message.content", "message.content | trim"): str.strip,
    CHATML.replace("message.content", "message.content.rstrip()"): str.rstrip,
    THINKS: lambda text: "<think>\n\n</think>\n\n" + text.lstrip("\n"),
}


@pytest.mark.parametrize("template", CUTS)
@pytest.mark.parametrize("around", ["{}", "Sure, the {}", "{} end", "\n{}\n", "<|im_end|>{} "])
def test_a_continued_message_ends_behind_its_own_text(template, around):
    """Also where the text occurs in the template's end marker, or is white space."""
    compiled = chatml(TOKENIZER, template)
    for text in map(around.format, ONE_CHARACTER):
        talk = [*USER, {"role": "assistant", "content": text}]
        prompt = compiled.render(talk, continue_final_message=True)
        wanted = f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{CUTS[template](text)}"
        assert prompt.plain == wanted, text
        ids = TOKENIZER.encode(prompt.text, guard=prompt.guard)
        assert ids.count(IM_END) == 1


@pytest.mark.parametrize(
    ("content", "template"),
    [
        ("", CHATML),
        ("a" * 40, CHATML.replace("message.content", "message.content[:22]")),
        ("a b", CHATML.replace("message.content", "message.content.split()[0]")),
    ],
)
def test_a_message_whose_end_is_not_shown_cannot_be_continued(content, template):
    talk = [*USER, {"role": "assistant", "content": content}]
    with pytest.raises(RequestError) as refused:
        chatml(TOKENIZER, template).render(talk, continue_final_message=True)
    assert refused.value.param in ("continue_final_message", "messages[1]")


def test_variables_may_not_replace_what_we_pass():
    for name in ("messages", "tools", "bos_token", "add_generation_prompt"):
        with pytest.raises(RequestError, match=f"may not set {name}"):
            chatml(TOKENIZER).render(USER, variables={name: "x"})


def test_tool_use_has_its_own_template_where_there_is_one():
    source = TemplateSource(
        {
            "default": "d{{ messages[0].content }}",
            "tool_use": "t[{{ tools[0].function.name }}]{{ messages[0].content }}",
        },
        "here",
    )
    template = ChatTemplate(source, named={}, special_texts=[])
    assert template.render(USER).plain == "dhi"
    assert template.render(USER, tools=TOOLS).plain == "t[f]hi"
    with pytest.raises(ConfigError, match="here has no chat template named 'default'"):
        ChatTemplate(TemplateSource({"tool_use": "x"}, "here"), named={}, special_texts=[])


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (CHATML + "<|im_start|>assistant\n", "<|im_end|>"),  # whatever add_generation_prompt says
        (CHATML.replace("<|im_end|>", ""), None),
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}{{ bos_token }}{% endfor %}", None),
        ("{% for m in messages %}<s>{{ m.content }} </s>{% endfor %}", "</s>"),
        ("{% for m in messages %}<|im_start|>{{ m.content }}<think>\n{% endfor %}", "<think>"),
        # The token of an answer in a channel ends no turn, and is not what the last one ends with.
        (
            "{% for m in messages %}<|im_start|>{{ m.content }}"
            "{{ '</s>' if loop.last else '<|im_end|>' }}{% endfor %}",
            "</s>",
        ),
        # A closing tag, then more of the turn.
        (
            "{% for m in messages %}<s>{{ m.content }}</s>tag<|im_end|>{{ m.role }}{% endfor %}",
            None,
        ),
        ("{{ messages[0].content }}{{ raise_exception('no') if messages | length > 1 }}", None),
    ],
)
def test_the_end_of_a_turn_is_what_the_template_writes_behind_an_answer(template, end):
    source = TemplateSource({"default": template}, "here")
    options = {"special_texts": TOKENIZER.special_texts, "added_texts": ["<think>"]}
    compiled = ChatTemplate(source, named=TOKENIZER.named, **options)
    assert compiled.turn_end([]) == end
    assert compiled.turn_end(["<|im_start|>", end]) is None


class TestSources:
    def folder(self, tmp_path, **configuration):
        byte_backend().save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(configuration))
        return tmp_path

    def shown(self, folder, flag=""):
        return load_text_side(folder, flag).template.render(USER).plain

    def template(self, letter):
        return letter + "{{ messages[0].content }}"

    def test_none_is_none_and_not_an_error(self, tmp_path):
        assert load_text_side(self.folder(tmp_path)).template is None

    def test_the_order_of_sources(self, tmp_path):
        folder = self.folder(tmp_path, chat_template=self.template("a"))
        assert self.shown(folder) == "ahi"
        (folder / "chat_template.json").write_text(
            json.dumps({"chat_template": self.template("b")})
        )
        assert self.shown(folder) == "bhi"
        (folder / "chat_template.jinja").write_text(self.template("c"))
        assert self.shown(folder) == "chi"
        own = tmp_path / "own.jinja"
        own.write_text(self.template("d"))
        assert self.shown(folder, str(own)) == "dhi"
        assert self.shown(folder, self.template("e")) == "ehi"

    def test_a_list_of_named_templates(self, tmp_path):
        named = [
            {"name": "default", "template": self.template("d")},
            {"name": "tool_use", "template": self.template("{{ tools[0].function.name }}")},
        ]
        template = load_text_side(self.folder(tmp_path, chat_template=named)).template
        assert template.render(USER, tools=TOOLS).plain == "fhi"

    def test_a_broken_one_stops_the_start_with_its_file(self, tmp_path):
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json does not compile"):
            load_text_side(self.folder(tmp_path, chat_template="{% for %}"))
        with pytest.raises(ConfigError, match="cannot read the chat template /nowhere"):
            load_text_side(self.folder(tmp_path), "/nowhere")

    def test_the_end_of_a_turn_is_an_end_token_beside_the_declared_one(self, tmp_path):
        folder = self.folder(tmp_path, chat_template=CHATML, eos_token="</s>")
        assert load_text_side(folder).tokenizer.stop_ids == {EOS, IM_END}
        assert load_text_side(folder, self.template("a")).tokenizer.stop_ids == {EOS}

    def test_gguf_metadata(self):
        with pytest.raises(CheckpointError, match="tokenizer"):
            load_text_side({"tokenizer.chat_template": CHATML})
