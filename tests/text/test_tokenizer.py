"""Token ids equal those of `transformers`; special tokens count only where they may."""

import itertools
import json
import unicodedata

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from bifolio.errors import CheckpointError, ConfigError, UnsupportedError
from bifolio.text.tokenizer import Tokenizer
from bifolio.text.tokenizer_files import load_text_side, tokenizer_from_folder
from bifolio.text.tokenizer_gguf import TokenType, tokenizer_from_gguf
from support.text import BOS, IM_END, IM_START, THINK, byte_backend, byte_tokenizer

TEXTS = [
    "",
    "Hello world",
    "x=12345 y 1,000.50 ²³½Ⅷ",
    "Čo je hlavné mesto Slovenska? Žltý kôň ďábelsky kričal ľaľa.",
    "def f(x):\n    return x**2  # 日本語\n\n\n\tok",
    "😀👩‍👩‍👧‍👦 emoji",
    "  leading",
    " trailing  ",
    "\r\n\r\n a\n \n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "I'll don't we've IT'S",
    "e\u0301 \u00a0\u3000\ufeff\ud7ff",
    "مرحبا بالعالم हिन्दी ภาษาไทย",
]


def trained(pre_tokenizer, vocab_size=600):
    """A byte-level BPE trained on TEXTS and a little prose, with two special tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    prose = ["the quick brown fox jumps over 12 345 lazy dogs; don't we'll it's 2024\n\n"] * 20
    backend.train_from_iterator([*TEXTS * 3, *prose], trainer)
    return backend


def gguf_metadata(backend, pre, **extra):
    settings_ = json.loads(backend.to_str())
    vocab = settings_["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    special = {token["content"] for token in settings_["added_tokens"]}
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in settings_["model"]["merges"]],
        "eos_token_id": vocab["<|im_end|>"],
    } | extra
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def oracle_words(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def qwen2_pattern():
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    return PRETOKENIZE_REGEX


def llama3_pattern():
    from transformers.convert_slow_tokenizer import TikTokenConverter

    return TikTokenConverter(vocab_file="unused").pattern


@pytest.mark.parametrize("rule", ["smollm", "gpt-2", "default", "llama-bpe", "qwen2"])
def test_a_tokenizer_rebuilt_from_gguf_equals_its_original(rule, caplog):
    words = {
        "smollm": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        ),
        "gpt-2": lambda: pre_tokenizers.ByteLevel(False),
        "default": lambda: pre_tokenizers.ByteLevel(False),
        "llama-bpe": lambda: oracle_words(llama3_pattern()),
        "qwen2": lambda: oracle_words(qwen2_pattern()),
    }[rule]()
    original = PreTrainedTokenizerFast(tokenizer_object=trained(words))
    ours = tokenizer_from_gguf(gguf_metadata(original._tokenizer, rule))
    for text in TEXTS:
        # Qwen2 normalises; the trained original here does not.
        same = unicodedata.normalize("NFC", text) if rule == "qwen2" else text
        assert ours.encode(text) == original(same, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ours.encode(text)) == same
    assert ours.named == {"eos_token": "<|im_end|>"}
    assert ours.stop_ids == {original.convert_tokens_to_ids("<|im_end|>")}
    assert ("no splitting rule" in caplog.text) == (rule == "default")


def test_smollm_splits_digits_one_by_one():
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = words
    trainer = trainers.BpeTrainer(
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["12345 67890 12345"] * 50, trainer)
    metadata = gguf_metadata(backend, "smollm")
    ours = tokenizer_from_gguf(metadata)
    assert [ours.token_text(i) for i in ours.encode("12345")] == ["1", "2", "3", "4", "5"]
    assert len(tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("12345")) == 1


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=60))
def test_byte_level_text_survives_a_round_trip(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def sentencepiece(tokens, scores, text):
    """The definition: merge the neighbours whose union scores highest, leftmost first."""
    rank = dict(zip(tokens, scores, strict=True))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [a + b for a, b in itertools.pairwise(pieces)]
        best = max((rank[u] for u in unions if u in rank), default=None)
        if best is None:
            break
        at = next(i for i, u in enumerate(unions) if rank.get(u) == best)
        pieces[at : at + 2] = [unions[at]]
    ids = {token: i for i, token in enumerate(tokens)}
    found = []
    for piece in pieces:
        if piece in ids:
            found.append(ids[piece])
        else:
            found += [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


def sentencepiece_metadata(**extra):
    words = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "abc", "▁abc", "cab", "▁c", "aa", "ca"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0] * 259 + [-20.0 + i % 7 - i / 100 for i in range(len(words))]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | extra
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


@settings(deadline=None, max_examples=200)
@given(st.text("abc ž\n", min_size=1, max_size=12))
def test_sentencepiece_from_gguf_follows_the_definition(text):
    metadata = sentencepiece_metadata()
    tokenizer = tokenizer_from_gguf(metadata)
    tokens, scores = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
    assert tokenizer.encode(text) == sentencepiece(tokens, scores, text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text, add_special_tokens=True)[0] == 1


@pytest.mark.parametrize("key", ["tokens", "model", "scores", "token_type", "add_bos_token"])
@pytest.mark.parametrize("value", [3, -0.5, [[1]], "abc", True])
def test_an_entry_of_a_gguf_file_that_is_of_another_type_is_named(key, value):
    key = f"tokenizer.ggml.{key}"
    if (key.endswith("model"), value) == (True, "abc") or (
        key.endswith("bos_token") and value is True
    ):
        return
    with pytest.raises(CheckpointError, match=key) as refusal:
        tokenizer_from_gguf(sentencepiece_metadata() | {key: value})
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("key", ["bos", "eos", "eot", "unknown", "padding"])
@pytest.mark.parametrize("value", [273, 2**32 - 2, 2**63, -2, 1.0, "</s>", [0, 273]])
def test_a_named_token_of_a_gguf_file_must_be_one_of_its_tokens(key, value):
    key = f"tokenizer.ggml.{key}_token_id"
    with pytest.raises(CheckpointError, match=key):
        tokenizer_from_gguf(sentencepiece_metadata() | {key: value})


@pytest.mark.parametrize("key", ["bos", "eos", "eot", "unknown", "padding"])
@pytest.mark.parametrize("value", [2**32 - 1, 2**64 - 1, -1, [-1]])
def test_an_id_of_minus_one_in_a_gguf_file_means_no_such_token(key, value, caplog):
    metadata = sentencepiece_metadata(eot_token_id=2, padding_token_id=0)
    whole = tokenizer_from_gguf(metadata)
    key = f"tokenizer.ggml.{key}_token_id"
    assert not caplog.text
    tokenizer = tokenizer_from_gguf(metadata | {key: value})
    assert f"{key} says that there is no such token" in caplog.text
    absent = tokenizer_from_gguf({k: v for k, v in metadata.items() if k != key})
    for one in (tokenizer, absent):
        assert one.named.items() <= whole.named.items()
        assert one.encode("abc", add_special_tokens=True) == absent.encode(
            "abc", add_special_tokens=True
        )
    assert tokenizer.named == absent.named
    assert tokenizer.stop_ids == absent.stop_ids


@pytest.mark.parametrize("merge", ["a q", "q a", "a b"])
def test_a_merge_of_what_is_no_token_is_named(merge):
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": [merge]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    with pytest.raises(CheckpointError, match="is no token"):
        tokenizer_from_gguf(metadata)


def test_a_chat_template_of_a_gguf_file_that_is_no_text_is_named():
    for key, value in {"chat_template": 3, "chat_templates": 3}.items():
        metadata = {"tokenizer.chat_template": "{{ messages }}", f"tokenizer.{key}": value}
        with pytest.raises(CheckpointError, match=f"tokenizer.{key} is 3"):
            load_text_side(sentencepiece_metadata() | metadata)


def test_what_a_gguf_file_lacks_or_we_do_not_know_is_named():
    good = sentencepiece_metadata()
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens"):
        tokenizer_from_gguf({})
    with pytest.raises(UnsupportedError, match="'t5' is not supported"):
        tokenizer_from_gguf(good | {"tokenizer.ggml.model": "t5"})
    with pytest.raises(UnsupportedError, match="'viking' is not supported"):
        tokenizer_from_gguf(good | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "viking"})
    with pytest.raises(CheckpointError, match="scores has 2 entries for 273"):
        tokenizer_from_gguf(good | {"tokenizer.ggml.scores": [0.0, 0.0]})
    with pytest.raises(CheckpointError, match="token_type has 1"):
        tokenizer_from_gguf(good | {"tokenizer.ggml.token_type": [TokenType.NORMAL]})


def test_special_tokens_in_text_count_unless_guarded():
    tokenizer = byte_tokenizer()
    text = "<|im_start|>hi<|im_end|>"
    assert tokenizer.encode(text) == [IM_START, *b"hi", IM_END]
    guarded, guard = (
        text.replace("<|im_end|>", "\ue000|im_end\ue001|>"),
        {"\ue000": "<", "\ue001": ""},
    )
    assert tokenizer.encode(guarded, guard=guard) == [IM_START, *b"hi<|im_end|>"]


def test_reserved_marks_are_tokens_unless_guarded_and_never_special():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("a<think>b") == [ord("a"), THINK, ord("b")]
    assert [*tokenizer.added_texts] == ["<think>"]
    tokenizer.reserve(["<think>"])
    assert tokenizer.encode("a<think>b") == [ord("a"), THINK, ord("b")]
    guard = {"\ue000": "<"}
    assert tokenizer.encode("\ue000think><think>", guard=guard) == [*b"<think>", THINK]
    assert tokenizer.decode([THINK], skip_special_tokens=True) == "<think>"
    assert "<think>" not in tokenizer.special_texts


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": False}])
def test_special_tokens_swallow_space_as_in_transformers(flags):
    backend = byte_backend()
    backend.add_special_tokens([AddedToken("<mask>", normalized=False, special=True, **flags)])
    original = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(backend.to_str()))
    ours = Tokenizer(backend, named={})
    for text in ("a <mask> b", "a<mask>  b", "  <mask>", "<mask>\n", "x <mask> <|im_end|> y"):
        assert ours.encode(text) == original(text, add_special_tokens=False)["input_ids"]


def test_only_the_first_piece_gets_the_mark_of_a_word_as_in_transformers():
    backend = Backend(
        models.BPE(
            vocab={"<0x0A>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "</s>": 5, "<unk>": 6},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("</s>", normalized=False, special=True)])
    original = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(backend.to_str()))
    ours = Tokenizer(backend, named={})
    for text in ("a", "ab a", "a</s>a b</s> a", "</s>a", "ba\n"):
        assert ours.encode(text) == original(text, add_special_tokens=False)["input_ids"], text


def test_a_special_token_that_is_an_ordinary_piece_cannot_be_forged():
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("a", -3.0), ("</s>", -1.0), ("<", -9.0), ("/", -9.0)]
    pieces += [("s", -9.0), (">", -9.0)]
    backend = Backend(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens([AddedToken("</s>", normalized=False, special=True)])
    ours = Tokenizer(backend, named={})
    assert ours.encode("a</s>") == [2, 3]
    assert ours.encode("a\ue000/s>", guard={"\ue000": "<"}) == [2, 4, 5, 6, 7]


def test_bos_is_put_before_plain_prompts_only_and_doubling_is_seen():
    tokenizer = byte_tokenizer(add_bos=True)
    assert tokenizer.prefix == (BOS,)
    assert tokenizer.encode("hi", add_special_tokens=True) == [BOS, *b"hi"]
    assert tokenizer.encode("hi") == [*b"hi"]
    doubled = tokenizer.encode("<s>hi", add_special_tokens=True)
    assert doubled == [BOS, BOS, *b"hi"]
    assert tokenizer.starts_with_two_bos(doubled)
    assert not tokenizer.starts_with_two_bos(tokenizer.encode("<s>hi"))


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=40))
def test_no_text_has_more_characters_than_its_tokens_can_hold(text):
    plain = byte_tokenizer()
    backend = byte_backend()
    backend.normalizer = normalizers.Sequence([normalizers.NFC()])
    composing = Tokenizer(backend, named={})
    for tokenizer in (plain, composing):
        assert len(text) <= tokenizer.most_chars(len(tokenizer.encode(text)))
    assert composing.most_chars(1) == 4 * plain.most_chars(1)
    backend.normalizer = normalizers.Strip()
    assert Tokenizer(backend, named={}).most_chars(1) == float("inf")


def test_a_decoder_that_we_cannot_follow_is_refused():
    backend = Backend(models.WordPiece(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"decoder \['WordPiece'\] is not supported"):
        Tokenizer(backend, named={})


class TestFolder:
    def write(self, folder, backend=None, **files):
        (backend or byte_backend()).save(str(folder / "tokenizer.json"))
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    def test_missing_and_damaged_files_are_named(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"is no model: it has neither config\.json"):
            tokenizer_from_folder(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
            tokenizer_from_folder(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
            tokenizer_from_folder(tmp_path)
        self.write(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("[]")
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json holds no JSON object"):
            tokenizer_from_folder(tmp_path)

    def test_end_token_and_names_come_from_the_side_files(self, tmp_path):
        self.write(
            tmp_path,
            tokenizer_config={"eos_token": {"content": "<|im_end|>", "lstrip": False}},
            special_tokens_map={"eos_token": "</s>", "bos_token": "<s>"},
        )
        tokenizer = tokenizer_from_folder(tmp_path)
        assert tokenizer.named == {"eos_token": "<|im_end|>", "bos_token": "<s>"}
        assert tokenizer.stop_ids == {IM_END}

    @pytest.mark.parametrize("flag", [True, False, None])
    @pytest.mark.parametrize("processor", [True, False])
    def test_bos_of_plain_prompts_follows_the_post_processor_as_in_transformers(
        self, tmp_path, flag, processor
    ):
        config = {"bos_token": "<s>", "eos_token": "</s>"}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {} if flag is None else {"add_bos_token": flag}
        self.write(tmp_path, byte_backend(add_bos=processor), tokenizer_config=config)
        ours = tokenizer_from_folder(tmp_path).encode("hi", add_special_tokens=True)
        original = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        assert ours == original("hi")["input_ids"]
        assert (ours[0] == BOS) == processor

    def test_tokens_declared_only_in_the_configuration_are_added(self, tmp_path):
        declared = {"content": "<|tool|>", "special": True, "normalized": False}
        config = {"added_tokens_decoder": {"261": declared}}
        self.write(tmp_path, tokenizer_config=config)
        assert tokenizer_from_folder(tmp_path).encode("<|tool|>") == [261]
        config = {"added_tokens_decoder": {"300": declared}}
        self.write(tmp_path, tokenizer_config=config)
        with pytest.raises(CheckpointError, match=r"gives '<.tool.>' the id 300, but it is 261"):
            tokenizer_from_folder(tmp_path)

    def test_a_post_processor_with_eos_is_followed(self, tmp_path):
        backend = byte_backend()
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
        )
        tokenizer = tokenizer_from_folder(self.write(tmp_path, backend))
        assert (tokenizer.prefix, tokenizer.suffix) == ((256,), (257,))


def test_the_word_rules_are_those_of_the_regex_module_too():
    """The `tokenizers` package uses Oniguruma; the rules must mean the same to both."""
    from bifolio.text.tokenizer_gguf import _LLAMA3_WORDS, _QWEN2_WORDS

    assert qwen2_pattern() == _QWEN2_WORDS
    for pattern in (_LLAMA3_WORDS, _QWEN2_WORDS):
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for text in TEXTS:
            expected = [m.group() for m in regex.finditer(pattern, text)]
            assert [piece for piece, _ in split.pre_tokenize_str(text)] == expected
