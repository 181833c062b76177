"""Detokenizing in parts equals decoding at once; stop strings end a text at the same place however it comes."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from kvrelay.common.request import SamplingParams
from kvrelay.common.text import ChoiceText, Detokenizer, StopPatterns, StopStrings
from kvrelay.common.tokenizer import Tokenizer

pytestmark = pytest.mark.unit

WRITINGS = [
    "Plain words, and more.",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 😀😃😄",
    "床前明月光，疑是地上霜。舉頭望明月，低頭思故鄉。",
    "مرحبا بالعالم، كيف حالك؟",
    "e\u0301 n\u0303 \u202eright\u202c \u00a0\u2003",
    "def f(x):\n\treturn x  # \ufffd\n",
    "𝕏 𐍈 ꙮ ﷽",
]
VOCAB = 49_152


@pytest.fixture(scope="module")
def smol(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


def built(folder: Path, backend: Backend) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def sentence_vocab(words: list[str]) -> dict[str, int]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    return {token: token_id for token_id, token in enumerate(tokens)}


WORDS = ["▁", "▁▁", "▁Hello", "▁world", "Hello", "ing", "é", "▁日本", "s", ",", "▁a", "<0xZZ>", "\ufffd", "a▁b"]


@pytest.fixture(scope="module")
def sentence(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As the tokenizers of Llama 2 and Mistral 7B: ▁ for a space, byte tokens, a prefix space that decoding strips."""
    backend = Backend(models.BPE(vocab=sentence_vocab(WORDS), merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<think ▁x>", special=False)])
    return built(tmp_path_factory.mktemp("sentence"), backend)


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    backend = Backend(models.BPE(vocab=sentence_vocab(WORDS), merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return built(tmp_path_factory.mktemp("meta"), backend)


def pushed(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """In parts of the given sizes, over and over, and the flush at the end."""
    parts, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        parts.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*parts, detokenizer.flush()]


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
# Tokens of few bytes are rare among all of them; incomplete characters come from them.
SMOL_IDS = st.lists(st.integers(0, VOCAB - 1) | st.integers(0, 300), max_size=40)


@settings(max_examples=150, deadline=None)
@given(ids=SMOL_IDS, sizes=SIZES, skip=st.booleans())
def test_parts_equal_the_whole_for_any_tokens(smol: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    parts = pushed(Detokenizer(smol, skip_special_tokens=skip), ids, sizes)
    assert "".join(parts) == smol.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(WRITINGS), sizes=SIZES)
def test_real_text_never_shows_half_a_character(smol: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = smol.encode(text)
    parts = pushed(Detokenizer(smol), ids, sizes)
    assert "".join(parts) == smol.decode(ids)
    if smol.decode(ids) == text:  # the vocabulary lacks some bytes, which only unassigned characters have
        assert parts[-1] == ""
    if "\ufffd" not in smol.decode(ids):
        assert not any("\ufffd" in part for part in parts)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=24), sizes=SIZES)
def test_any_bytes(smol: Tokenizer, data: bytes, sizes: list[int]) -> None:
    """One token a byte, where the vocabulary has one: surrogates, overlong forms, lone continuation bytes."""
    token_of = {smol.token_bytes(i): i for i in range(VOCAB) if len(smol.token_bytes(i)) == 1}
    ids = [token_of[bytes([b])] for b in data if bytes([b]) in token_of]
    assert "".join(pushed(Detokenizer(smol), ids, sizes)) == smol.decode(ids)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=30), sizes=SIZES, skip=st.booleans())
def test_sentence_pieces(sentence: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    parts = pushed(Detokenizer(sentence, skip_special_tokens=skip), ids, sizes)
    assert "".join(parts) == sentence.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="aé日😀▁ \ufffd", max_size=12), sizes=SIZES, cut=st.integers(0, 3))
def test_runs_of_byte_tokens(sentence: Tokenizer, text: str, sizes: list[int], cut: int) -> None:
    data = text.encode()[: max(0, len(text.encode()) - cut)]
    ids = [3 + b for b in data]
    assert "".join(pushed(Detokenizer(sentence), ids, sizes)) == sentence.decode(ids)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 272), max_size=20), sizes=SIZES, skip=st.booleans())
def test_meta_space(meta: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    parts = pushed(Detokenizer(meta, skip_special_tokens=skip), ids, sizes)
    assert "".join(parts) == meta.decode(ids, skip)


def test_after_a_prompt_the_first_space_stays(sentence: Tokenizer) -> None:
    hello, world = (3 + 256 + WORDS.index(word) for word in ("▁Hello", "▁world"))
    assert Detokenizer(sentence).push([world]) == "world"
    assert Detokenizer(sentence, prompt_token_ids=[1]).push([world]) == "world"  # <s> shows nothing
    assert Detokenizer(sentence, prompt_token_ids=[1, hello]).push([world]) == " world"
    assert Detokenizer(sentence, prompt_token_ids=[1], skip_special_tokens=False).push([world]) == " world"


def test_a_character_that_the_prompt_began(smol: Tokenizer, sentence: Tokenizer) -> None:
    token_of = {smol.token_bytes(i): i for i in range(VOCAB) if len(smol.token_bytes(i)) == 1}
    for tokenizer, ids in ((smol, [token_of[bytes([b])] for b in "é".encode()]), (sentence, [3 + 0xC3, 3 + 0xA9])):
        detokenizer = Detokenizer(tokenizer, prompt_token_ids=[300, ids[0]])
        assert detokenizer.push(ids[1:]) + detokenizer.flush() == "é"
        detokenizer = Detokenizer(tokenizer, prompt_token_ids=[300, *ids])
        assert detokenizer.flush() == ""


def test_an_unknown_decoder_is_refused_at_start(tmp_path: Path) -> None:
    unsupported = [
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    ]
    for decoder in unsupported:
        backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
        backend.decoder = decoder
        with pytest.raises(ValueError, match="not supported"):
            built(tmp_path, backend)
    with pytest.raises(ValueError, match="no decoder"):
        built(tmp_path, Backend(models.BPE(vocab={"a": 0}, merges=[])))


def test_bytes_and_text_of_single_tokens(smol: Tokenizer, sentence: Tokenizer) -> None:
    for text in WRITINGS:
        ids = smol.encode(text)
        assert b"".join(smol.token_bytes(token_id) for token_id in ids) == text.encode()
    assert smol.token_text(2) == "<|im_end|>"
    assert smol.token_text(10**6) == ""
    half = next(i for i in range(VOCAB) if smol.token_bytes(i) == b"\xf0")
    assert smol.token_text(half) == "\ufffd"
    assert sentence.token_bytes(3 + 0xE6) == b"\xe6"
    assert sentence.token_text(3 + 256 + WORDS.index("▁Hello")) == " Hello"


# Stop strings.


def run_stops(stops: list[str], text: str, sizes: list[int], include: bool) -> tuple[str, str | None]:
    finder, shown, start, turn = StopStrings(stops, include), "", 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        part, stop = finder.push(text[start : start + size])
        shown += part
        if stop is not None:
            return shown, stop
        # What is held back is the beginning of a stop string, and all of what could be.
        held = text[len(shown) : start + size]
        assert text.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(text[: start + size].endswith(s[:k]) for s in stops for k in range(len(held) + 1, len(s)))
        start, turn = start + size, turn + 1
    return shown + finder.flush(), None


def plain_stops(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4),
    text=st.text(alphabet="ab", max_size=40) | st.text(alphabet="abc", max_size=40),
    sizes=SIZES,
    include=st.booleans(),
)
def test_stops_equal_plain_search(stops: list[str], text: str, sizes: list[int], include: bool) -> None:
    assert run_stops(stops, text, sizes, include) == plain_stops(stops, text, include)


def test_a_stop_string_may_overlap_one_that_did_not_count() -> None:
    finder = StopStrings(["abab"])
    assert finder.push("xabab", armed=False) == ("xab", None)
    assert finder.push("ab") == ("", "abab")


class CountedText(str):
    """Counts the comparisons that are made with its characters."""

    __slots__ = ()
    reads = 0

    def __getitem__(self, key: object) -> str:
        CountedText.reads += 1
        return str.__getitem__(self, key)  # type: ignore[index]


def test_hostile_stops_take_linear_time() -> None:
    """Near misses over and over: characters of stop strings are read at most twice for each of the text's."""
    stop = CountedText("a" * 500 + "b")
    patterns = StopPatterns([stop])
    text = ("a" * 499 + "c") * 40 + "a" * 4000
    finder = StopStrings(patterns)
    CountedText.reads = 0
    shown = "".join(finder.push(text[at : at + 7])[0] for at in range(0, len(text), 7)) + finder.flush()
    assert shown == text
    assert CountedText.reads <= 4 * len(text)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


# A choice.


def choice(smol: Tokenizer, **options: object) -> ChoiceText:
    align = bool(options.pop("align", False))
    return ChoiceText(smol, SamplingParams(**options), align=align)  # type: ignore[arg-type]


def test_a_choice_without_stops(smol: Tokenizer) -> None:
    text = choice(smol)
    ids = smol.encode("One 😀 two")
    deltas = [text.push([token_id]) for token_id in ids[:-1]] + [text.push(ids[-1:], finished=True)]
    assert "".join(delta.text for delta in deltas) == "One 😀 two"
    assert [delta.finished for delta in deltas] == [False] * (len(ids) - 1) + [True]
    assert [delta.num_tokens for delta in deltas] == [1] * len(ids)
    assert text.finished
    late = text.push(ids)
    assert (late.text, late.num_tokens, late.finished) == ("", 0, False)


def test_an_unfinished_character_shows_at_the_end(smol: Tokenizer) -> None:
    text = choice(smol)
    ids = smol.encode("𐍈")[:-1]
    assert text.push(ids).text == ""
    assert text.push([], finished=True).text.startswith("\ufffd")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_stop_string_ends_the_choice(smol: Tokenizer, include: bool, whole: bool) -> None:
    ids = smol.encode("The answer is forty two. And then some more.")
    text = choice(smol, stop=("two. A", "nowhere"), include_stop_str_in_output=include)
    deltas = [text.push(ids, finished=True)] if whole else [text.push([token_id]) for token_id in ids]
    assert "".join(delta.text for delta in deltas) == "The answer is forty " + ("two. A" if include else "")
    (last,) = [delta for delta in deltas if delta.finished]
    assert last.stop_reason == "two. A"
    used = sum(delta.num_tokens for delta in deltas)
    assert "two. A" in smol.decode(ids[:used])
    assert "two. A" not in smol.decode(ids[: used - 1])
    assert text.num_tokens == used


def test_a_stop_token_is_not_in_the_text(smol: Tokenizer) -> None:
    period = smol.encode(".")[0]
    for skip in (True, False):
        for token, options in ((period, {"stop_token_ids": (period,)}), (2, {})):
            text = choice(smol, skip_special_tokens=skip, stop=("zz",), **options)
            delta = text.push([*smol.encode("Fine z"), token], finished=True, stop_token_id=token)
            assert (delta.text, delta.finished, delta.stop_reason) == ("Fine z", True, token)
            assert delta.num_tokens == len(smol.encode("Fine z")) + 1


def test_what_was_held_for_a_stop_string_comes_at_the_end(smol: Tokenizer) -> None:
    text = choice(smol, stop=("###",))
    ids = smol.encode("a ##")
    first = text.push(ids)
    last = text.push([], finished=True)
    assert (first.text, first.finished) == ("a ", False)
    assert (last.text, last.finished, last.stop_reason) == ("##", True, None)


def test_stop_strings_wait_for_min_tokens(smol: Tokenizer) -> None:
    ids = smol.encode("one two one two one two")
    (one, two), length = ids[:2], len(ids)
    assert [smol.token_text(token_id) for token_id in ids] == ["one", " two", " one", " two", " one", " two"]
    assert one != two
    for min_tokens, kept in ((0, 1), (1, 1), (2, 3), (3, 3), (4, 5), (6, 6)):
        for size in (1, length):
            text = choice(smol, stop=("two",), min_tokens=min_tokens)
            shown = "".join(text.push(ids[at : at + size]).text for at in range(0, length, size))
            shown += text.push([], finished=True).text
            assert shown == smol.decode(ids[:kept]) + (" " if kept < length else "")
            assert text.num_tokens == min(kept + 1, length)


def test_a_stop_string_may_begin_before_min_tokens(smol: Tokenizer) -> None:
    text = choice(smol, stop=("one two",), min_tokens=1)
    assert [text.push([token_id]).text for token_id in smol.encode("one two one")] == ["", "", ""]
    assert text.finished


@pytest.mark.parametrize("writing", WRITINGS)
def test_tokens_are_aligned_with_the_text(smol: Tokenizer, writing: str) -> None:
    ids = smol.encode(writing)
    text = choice(smol, align=True)
    tokens = [token for token_id in ids for token in text.push([token_id]).tokens]
    assert [token.token_id for token in tokens] == ids
    assert b"".join(token.data for token in tokens).decode() == writing
    for index, token in enumerate(tokens):
        before = b"".join(token.data for token in tokens[:index])
        assert token.offset == len(before.decode("utf-8", "ignore"))
        assert token.text == token.data.decode("utf-8", "replace")


def test_aligned_tokens_end_with_the_stop_string(smol: Tokenizer) -> None:
    ids = smol.encode("one two three four")
    text = choice(smol, align=True, stop=("three",))
    delta = text.push(ids, finished=True)
    assert [token.text for token in delta.tokens] == ["one", " two", " three"]
    assert [token.offset for token in delta.tokens] == [0, 3, 7]
    assert (delta.text, delta.num_tokens) == ("one two ", 3)


def test_an_aligned_stop_token_has_its_name(smol: Tokenizer) -> None:
    text = choice(smol, align=True)
    delta = text.push([*smol.encode("hi"), 2], finished=True, stop_token_id=2)
    assert [(token.text, token.offset) for token in delta.tokens][-1] == ("<|im_end|>", 2)
    assert delta.text == "hi"


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.sampled_from(["the", " the", "\n", "😀", " end", ".", "漢"]), max_size=25),
    stops=st.lists(st.sampled_from(["the the", "😀", "end.", "\n\n", "漢漢", " "]), max_size=3, unique=True),
    sizes=SIZES,
)
def test_parts_of_any_size_give_one_text(smol: Tokenizer, words: list[str], stops: list[str], sizes: list[int]) -> None:
    ids = smol.encode("".join(words))

    def result(part_sizes: list[int]) -> tuple[str, int, object]:
        text, shown, reason, start, turn = choice(smol, stop=tuple(stops)), "", None, 0, 0
        while start < len(ids) and not text.finished:
            size = part_sizes[turn % len(part_sizes)]
            delta = text.push(ids[start : start + size])
            shown, reason, start, turn = shown + delta.text, delta.stop_reason, start + size, turn + 1
        if not text.finished:
            delta = text.push([], finished=True)
            shown, reason = shown + delta.text, delta.stop_reason
        return shown, text.num_tokens, reason

    assert result(sizes) == result([1])
    assert result([1])[0] == plain_stops(stops, "".join(words), include=False)[0]
