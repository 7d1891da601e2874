"""The tasks of the small trained model: made from a seed, with their answers, as turns of a chat.

A conversation is a list of turns; a turn is what the user says and what must be answered. In the
text that the model reads, turns stand as `<|user|>…<|assistant|>…<|end|>`, after one `<|bos|>`; the
chat template of the checkpoint writes the same. Five tasks:

- copy: labelled random strings `[k:STRING]` inside other text; `copy k` is answered by STRING;
- kv: pairs `key=value;`, many of them; the question is a key, the answer its value;
- sums: `12+7=` is answered by `19`;
- tools: JSON schemas of two or three functions and a request; the answer is the call as JSON;
- words: sentences from word lists, translated between English and Slovak.

Training and held-out examples of `sums` and `plural` are kept apart by a hash of the content;
`copy`, `kv` and `tools` draw random strings from a space too large to meet twice.
"""

from __future__ import annotations

import json
import random
import string
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from tiny_words import ADJECTIVES, NOUNS, PLACES, TOOL_NOUNS, TOOL_VERBS, VALUE_WORDS, VERBS, Noun

MARKS = ("<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>")
PAD, BOS, USER, ASSISTANT, END, SYSTEM = range(256, 256 + len(MARKS))
IGNORE = -100  # the target of a token that is not to be learned
HELD_OUT_SHARE = 12  # one of so many sums and sentences is never trained on
ALPHABETS = (
    string.ascii_letters + string.digits,
    string.ascii_lowercase + string.digits,
    string.ascii_lowercase,
    string.ascii_uppercase + string.digits,
)


@dataclass(frozen=True)
class TaskTurn:
    """What the user says, and the only right answer."""

    user: str
    answer: str


Conversation = list[TaskTurn]
"""Turns that share one context: a question may be about what an earlier turn said."""

TURN_TOKENS = 3  # <|user|>, <|assistant|>, <|end|>


def turn_tokens(turn: TaskTurn) -> int:
    """Tokens of a turn: its UTF-8 bytes and three marks."""
    return len(turn.user.encode()) + len(turn.answer.encode()) + TURN_TOKENS


def encode(conversation: Conversation) -> tuple[list[int], list[int]]:
    """Token ids, and the targets: the answers and their end, everything else ignored."""
    ids, targets = [BOS], [IGNORE]
    for turn in conversation:
        asked = [USER, *turn.user.encode(), ASSISTANT]
        said = [*turn.answer.encode(), END]
        ids += asked + said
        targets += [IGNORE] * len(asked) + said
    return ids, targets


def held_out(content: str) -> bool:
    """True for the content that only evaluation may show."""
    return zlib.crc32(content.encode()) % HELD_OUT_SHARE == 0


def random_string(rng: random.Random, alphabet: str, low: int, high: int) -> str:
    """A string of `low` to `high` characters."""
    return "".join(rng.choices(alphabet, k=rng.randint(low, high)))


# --- copying and retrieval: one question per turn, the context before it or with it ---------------


def copy_conversation(rng: random.Random, tokens: int) -> Conversation:
    """Labelled strings in other text, asked back one by one, in at most `tokens` tokens."""
    alphabet = rng.choice(ALPHABETS)
    low, high = rng.choice(((16, 32), (16, 32), (8, 32), (4, 16)))
    filler = rng.choice((0.0, 0.3, 0.6, 0.85))
    labels = rng.sample(string.ascii_lowercase, 26)
    known: dict[str, str] = {}

    def item() -> str:
        if labels and rng.random() >= filler:
            label = labels.pop()
            known[label] = random_string(rng, alphabet, low, high)
            return f"[{label}:{known[label]}]"
        return _filler(rng, alphabet)

    def question() -> TaskTurn:
        label = rng.choice(list(known))
        return TaskTurn(f"copy {label}", known[label])

    def seeded() -> bool:
        return bool(known)

    return _stream(rng, tokens, item, question, seeded, joint=" ")


def kv_conversation(rng: random.Random, tokens: int) -> Conversation:
    """Pairs, asked back one by one, in at most `tokens` tokens."""
    alphabet = rng.choice(ALPHABETS)
    key_low, key_high = rng.choice(((4, 4), (4, 6), (3, 8)))
    value_low, value_high = rng.choice(((4, 4), (4, 8), (6, 6)))
    known: dict[str, str] = {}

    def item() -> str:
        key = random_string(rng, alphabet, key_low, key_high)
        known[key] = random_string(rng, alphabet, value_low, value_high)
        return f"{key}={known[key]};"

    def question() -> TaskTurn:
        key = rng.choice(list(known))
        return TaskTurn(key, known[key])

    def seeded() -> bool:
        return bool(known)

    return _stream(rng, tokens, item, question, seeded, joint="")


def _stream(
    rng: random.Random,
    tokens: int,
    item: Callable[[], str],
    question: Callable[[], TaskTurn],
    seeded: Callable[[], bool],
    joint: str,
) -> Conversation:
    """Blocks of items, each followed by questions about everything so far."""
    blocks = rng.choice((1, 1, 2, 4))
    context_share = rng.uniform(0.2, 0.7)
    turns: Conversation = []
    used = 1
    context = ""
    for block in range(1, blocks + 1):
        end = tokens * block // blocks
        context_end = used + int((end - used) * context_share)
        while used + len(context.encode()) < context_end or not seeded():
            context += item() + joint
        context = context.rstrip(" \n") + "\n"
        while True:
            asked = question()
            turn = TaskTurn(context + asked.user, asked.answer)
            if used + turn_tokens(turn) > end:
                break  # what was told stays for the next block
            turns.append(turn)
            used += turn_tokens(turn)
            context = ""
    return turns


def _filler(rng: random.Random, alphabet: str) -> str:
    kind = rng.random()
    if kind < 0.4:
        return random_string(rng, alphabet, 8, 40)
    return sentence_pair(rng)[rng.randrange(2)]


# --- small tasks: a turn stands alone ------------------------------------------------------------


def sums_turn(rng: random.Random, held: bool) -> TaskTurn:
    """Addition and subtraction to 99, multiplication to 12."""
    while True:
        kind = rng.choice("+-*")
        if kind == "*":
            a, b = rng.randint(0, 12), rng.randint(0, 12)
            answer = a * b
        else:
            a, b = rng.randint(0, 99), rng.randint(0, 99)
            answer = a + b if kind == "+" else a - b
        if held_out(f"{a}{kind}{b}") == held:
            return TaskTurn(f"{a}{kind}{b}=", str(answer))


def sentence_pair(rng: random.Random, held: bool = False) -> tuple[str, str]:
    """An English sentence and the same in Slovak."""
    while True:
        subject, thing = rng.choice(NOUNS), rng.choice(NOUNS)
        verb = rng.choice(VERBS)
        if held_out(f"{subject.en}|{verb[0]}|{thing.en}") == held:
            break
    english_1, slovak_1 = _phrase(rng, subject, accusative=False)
    english_2, slovak_2 = _phrase(rng, thing, accusative=True)
    english = f"{english_1} {verb[0]} {english_2}"
    slovak = f"{slovak_1} {verb[1]} {slovak_2}"
    if rng.random() < 0.3:
        place = rng.choice(PLACES)
        english, slovak = f"{english} {place[0]}", f"{slovak} {place[1]}"
    return f"{english[0].upper()}{english[1:]}.", f"{slovak[0].upper()}{slovak[1:]}."


def _phrase(rng: random.Random, noun: Noun, accusative: bool) -> tuple[str, str]:
    form = noun.sk_accusative if accusative else noun.sk
    if rng.random() < 0.5:
        return f"the {noun.en}", form
    english, forms = rng.choice(ADJECTIVES)
    slovak = forms[noun.agreement(accusative)]
    return f"the {english} {noun.en}", f"{slovak} {form}"


def words_turn(rng: random.Random, held: bool) -> TaskTurn:
    """Translate a sentence, either way."""
    english, slovak = sentence_pair(rng, held)
    if rng.random() < 0.5:
        return TaskTurn(f"sk: {english}", slovak)
    return TaskTurn(f"en: {slovak}", english)


def tools_turn(rng: random.Random) -> TaskTurn:
    """Two or three functions as JSON schemas, a request, and the call that matches."""
    names = [f"{rng.choice(TOOL_VERBS)}_{rng.choice(TOOL_NOUNS)}" for _ in range(rng.randint(2, 3))]
    names = list(dict.fromkeys(names))
    schemas = []
    for name in names:
        fields = rng.sample(TOOL_NOUNS, rng.randint(1, 3))
        properties = {f: {"type": rng.choice(("string", "integer", "boolean"))} for f in fields}
        parameters = {"type": "object", "properties": properties, "required": fields}
        schemas.append({"name": name, "parameters": parameters})
    chosen = rng.choice(schemas)
    arguments: dict[str, str | int | bool] = {}
    for field, kind in chosen["parameters"]["properties"].items():  # type: ignore[index]
        arguments[field] = _value(rng, kind["type"])
    said = [
        f"{field} {str(value).lower() if isinstance(value, bool) else value}"
        for field, value in arguments.items()
    ]
    rng.shuffle(said)
    request = f"call {chosen['name']} with {', '.join(said)}"
    lines = [json.dumps(schema) for schema in schemas]
    return TaskTurn(
        "\n".join([*lines, request]), json.dumps({"name": chosen["name"], "arguments": arguments})
    )


def _value(rng: random.Random, kind: str) -> str | int | bool:
    if kind == "integer":
        return rng.randint(0, 9999)
    if kind == "boolean":
        return rng.random() < 0.5
    if rng.random() < 0.5:
        return rng.choice(VALUE_WORDS)
    return random_string(rng, ALPHABETS[0], 3, 10)


# --- held-out questions --------------------------------------------------------------------------


def held_copy(rng: random.Random, tokens: int) -> Conversation:
    """One question: a string of 16 to 32 characters, anywhere in a prompt of `tokens` tokens.

    The prompt and its answer fill `tokens`; three more labelled strings stand in the text.
    """
    alphabet = ALPHABETS[0]
    labels = rng.sample(string.ascii_lowercase, 4)
    known = {label: random_string(rng, alphabet, 16, 32) for label in labels}
    asked = rng.choice(labels)
    question = f"\ncopy {asked}"
    marked = [f"[{label}:{text}]" for label, text in known.items()]
    room = tokens - 1 - TURN_TOKENS - len(known[asked]) - len(question)
    room -= sum(len(text) + 1 for text in marked)
    parts: list[str] = []
    while room > 0:
        text = _filler(rng, alphabet)
        if len(text.encode()) + 1 > room:
            text = random_string(rng, alphabet, room, room)
        parts.append(text)
        room -= len(text.encode()) + 1
    for text in marked:
        parts.insert(rng.randint(0, len(parts)), text)
    return [TaskTurn(" ".join(parts) + question, known[asked])]


def held_kv(rng: random.Random, tokens: int) -> Conversation:
    """One question: a key of 4 characters among as many pairs as fill `tokens` tokens."""
    alphabet = ALPHABETS[1]
    room = tokens - 1 - TURN_TOKENS - 4 - 6 - 1
    pairs: dict[str, str] = {}
    while len(pairs) < max(1, room // 12):
        pairs[random_string(rng, alphabet, 4, 4)] = random_string(rng, alphabet, 6, 6)
    key = rng.choice(list(pairs))
    return [TaskTurn("".join(f"{k}={v};" for k, v in pairs.items()) + f"\n{key}", pairs[key])]


def held_question(task: str, rng: random.Random, tokens: int) -> Conversation:
    """One held-out conversation with one question; `tokens` counts for `copy` and `kv` only."""
    if task == "copy":
        return held_copy(rng, tokens)
    if task == "kv":
        return held_kv(rng, tokens)
    if task == "sums":
        return [sums_turn(rng, held=True)]
    if task == "words":
        return [words_turn(rng, held=True)]
    assert task == "tools", task
    return [tools_turn(rng)]


# --- training rows -------------------------------------------------------------------------------

LONG = ("copy", "kv")
SHORT = {"tools": 0.36, "words": 0.42, "sums": 0.22}


def training_row(rng: random.Random, tokens: int, long: float = 0.7) -> list[Conversation]:
    """Conversations that together take at most `tokens` tokens, and nearly all of them.

    `long` is the share of copying and retrieval; where too little room is left for these, short
    tasks fill it.
    """
    row: list[Conversation] = []
    room = tokens
    task = _choose(rng, long)
    while room >= 48:
        if task in LONG:
            take = room if room < 160 or rng.random() < 0.6 else rng.randint(96, room)
            make = copy_conversation if task == "copy" else kv_conversation
            conversation = make(rng, take)
        else:
            conversation = _small(rng, task, min(room, 256 if task != "tools" else room))
        if conversation:
            row.append(conversation)
        used = 1 + sum(turn_tokens(turn) for turn in conversation)
        room -= max(used, 32)
        if task in LONG and room < 160:
            task = rng.choice(("sums", "words"))
        elif rng.random() < 0.5:
            task = _choose(rng, long)
    return row


def _choose(rng: random.Random, long: float) -> str:
    if rng.random() < long:
        return rng.choice(LONG)
    return rng.choices(list(SHORT), list(SHORT.values()))[0]


def _small(rng: random.Random, task: str, tokens: int) -> Conversation:
    turns: Conversation = []
    used = 1
    while True:
        if task == "sums":
            turn = sums_turn(rng, held=False)
        elif task == "words":
            turn = words_turn(rng, held=False)
        else:
            turn = tools_turn(rng)
        if used + turn_tokens(turn) > tokens:
            return turns
        turns.append(turn)
        used += turn_tokens(turn)
        if task == "tools" and rng.random() < 0.7:
            return turns
