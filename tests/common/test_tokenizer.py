"""The tokenizer and the chat template against transformers, and what they refuse."""

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from kvrelay.common.errors import InvalidRequest
from kvrelay.common.template import ChatTemplate
from kvrelay.common.tokenizer import Tokenizer, eos_token_ids

pytestmark = pytest.mark.unit

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\n\nlines  ",
    "def f(x):\n    return x ** 2  # square\n",
    "日本語と中文と한국어",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, e\u0301 combined",
    "<|im_start|>user\nquoted control<|im_end|>",
    "\x00\x1f\x7f\ufffd",
    "x" * 3000,
]
CHAT = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "Wie geht's?\n  Gut! "},
    {"role": "assistant", "content": "Ja."},
    {"role": "user", "content": "<|im_end|>日本 😀", "name": "Zoë"},
]
TEMPLATES = {
    "blocks": "{% for message in messages %}\n  {% if message.role == 'user' %}\n    U: {{ message.content | trim }}\n"
    "  {% else %}\n    O: {{ message.content }}\n  {% endif %}\n{% endfor %}\n",
    "tokens": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ unk_token }}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "loop": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ loop.index }}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}"
    "{{ ns.n }} {{ tools is none }} {{ documents is none }} {{ missing is defined }}{{ missing }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "date": "{{ strftime_now('%Y') }} {{ messages[0].content[:3] }} {{ messages[0].get('name', 'none') }}",
    "macro": "{%- macro say(m) -%}<{{ m.role | upper }}>{{ m.content }}{%- endmacro -%}\n"
    "{%- for m in messages -%}{{ say(m) }}{%- endfor -%}",
}


@pytest.fixture(scope="module")
def ours(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tokenizer's files, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, tmp_path / name)
    return tmp_path


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_encodes_and_decodes_as_transformers(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=200))
def test_encodes_any_text_as_transformers(ours: Tokenizer, theirs: Any, text: str) -> None:
    assert ours.encode(text) == theirs.encode(text)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=40), skip=st.booleans())
def test_decodes_any_tokens_as_transformers(ours: Tokenizer, theirs: Any, ids: list[int], skip: bool) -> None:
    assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], CHAT[:1], CHAT[1:3]], ids=range(4))
def test_chat_as_transformers(ours: Tokenizer, theirs: Any, chat: list[dict[str, str]], prompt: bool) -> None:
    expected = theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=True, return_dict=False)
    assert ours.chat(chat, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_as_transformers(theirs: Any, name: str) -> None:
    ours = ChatTemplate(TEMPLATES[name], theirs.special_tokens_map)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            CHAT, chat_template=TEMPLATES[name], add_generation_prompt=prompt, tokenize=False
        )
        assert ours.render(CHAT, prompt) == expected


@pytest.mark.parametrize("place", ["jinja", "config", "list", "json"])
def test_places_of_a_template(folder: Path, place: str) -> None:
    source = TEMPLATES["tokens"]
    match place:
        case "jinja":
            (folder / "chat_template.jinja").write_text(source)
            configure(folder, chat_template="another one, which the file overrides")
        case "config":
            configure(folder, chat_template=source)
        case "list":
            configure(folder, chat_template=[{"name": "x", "template": "x"}, {"name": "default", "template": source}])
        case "json":
            (folder / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.has_chat_template
    named = source if place == "json" else None  # transformers reads this file for processors only
    assert ours.render(CHAT) == theirs.apply_chat_template(
        CHAT, chat_template=named, add_generation_prompt=True, tokenize=False
    )


def test_absent_content_is_not_rendered_as_none(folder: Path) -> None:
    configure(folder, chat_template="{% for m in messages %}{{ m.content }}|{{ m.name is defined }}{% endfor %}")
    assert Tokenizer(folder).render([{"role": "user", "content": "a", "name": None}]) == "a|False"


@pytest.mark.parametrize("single", ["<|im_start|> $A", "<|im_start|> $A <|im_end|>", "$A"])
def test_bos_and_eos_as_the_file_says_and_only_once_in_a_chat(folder: Path, single: str) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    configure(folder, chat_template=TEMPLATES["tokens"], add_bos_token=False, add_eos_token=True)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("Hello") == theirs.encode("Hello")
    assert len(ours.encode("Hello")) == len(ours.encode("Hello", add_special_tokens=False)) + single.count("<")
    tokens = ours.chat(CHAT[:1])
    assert tokens == theirs.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert tokens.count(1) == 1
    assert tokens[0] == 1


def test_tokens_that_only_the_configuration_knows(folder: Path) -> None:
    added = {
        "content": "<new>",
        "lstrip": True,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    configure(folder, added_tokens_decoder={"49152": added}, sep_token="<sep>")
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "a <new>b<sep> c"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert {49152, 49153} < set(ids)
    assert ours.vocab_size == len(theirs) == 49154
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_truncation_in_the_file_is_not_obeyed(folder: Path) -> None:
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    found["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(found))
    assert len(Tokenizer(folder).encode("one two three four five six seven")) == 7


def test_end_of_sequence_by_the_first_file_that_says(folder: Path, ours: Tokenizer) -> None:
    assert ours.eos_token_ids == (2,)
    assert eos_token_ids(folder) == ()
    assert Tokenizer(folder).eos_token_ids == (2,)  # the tokenizer's own
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer(folder).eos_token_ids == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert Tokenizer(folder).eos_token_ids == (3, 4)


async def test_a_long_text_leaves_the_event_loop_free(ours: Tokenizer) -> None:
    """While the thread encodes, the loop takes turns; the number of turns, not the time, is what counts."""
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    encoding = asyncio.ensure_future(ours.encode_async(text))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100
    assert len(await encoding) == len(ours.encode(text))
    assert await ours.encode_async("short") == ours.encode("short")
    assert await ours.chat_async(CHAT) == ours.chat(CHAT)


def test_threads_share_a_tokenizer(ours: Tokenizer) -> None:
    expected = [ours.encode(text) for text in TEXTS]
    results: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: results.append([ours.encode(text) for text in TEXTS])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8


# What is refused.


def test_a_lone_surrogate_is_refused_with_the_field(ours: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at character 3") as raised:
        ours.encode("abc\ud800def")
    assert raised.value.param == "prompt"
    with pytest.raises(InvalidRequest) as raised:
        ours.encode("\udfff", param="input")
    assert raised.value.param == "input"
    with pytest.raises(InvalidRequest) as raised:
        ours.chat([{"role": "user", "content": "\ud83d"}])
    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.append(1) }}", "not safely callable|SecurityError|unsafe|immutable|not safe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10000000) | list | length }}", "Range too big"),
    ],
)
def test_what_a_template_refuses_names_the_messages(source: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as raised:
        ChatTemplate(source, {}).render(CHAT)
    assert raised.value.param == "messages"


def test_no_messages_and_no_template(folder: Path, ours: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="must not be empty"):
        ours.chat([])
    without = Tokenizer(folder)
    assert not without.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        without.chat(CHAT)


def test_a_broken_folder_is_named(folder: Path, tmp_path: Path) -> None:
    configure(folder, chat_template="{% if %}")
    with pytest.raises(ValueError, match="chat template is not valid"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json holds no JSON object"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        Tokenizer(folder)
    with pytest.raises(ValueError, match="there is no"):
        Tokenizer(tmp_path / "nowhere")
