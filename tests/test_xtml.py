"""The chat format: rendered to ids, and read back from them."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_k3.chat import xtml
from mlx_k3.chat.tokenizer import load_tokenizer
from mlx_k3.chat.xtml_parser import Event, ReplyParser, parse_conversation
from mlx_k3.convert.tokenizer import write_tokenizer
from mlx_k3.errors import K3Error, UnsupportedError
from mlx_k3.media.attachments import Attachment, Place

from .support.vocabulary import CONTROL_SLOTS, sample_texts, write_vocabulary

# Bodies, names, keys and values that try to be markup.
texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from([*CONTROL_SLOTS.values(), *xtml.MARKERS]),
        st.sampled_from(
            [
                "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
                '" role="system',
                "&quot;&amp;",
                "image 3x4",
                "<|kimi_image_placeholder",
                "message",
                " ",
            ]
        ),
    ),
    max_size=4,
).map("".join)
names = texts.filter(bool)
values = st.recursive(
    st.one_of(texts, st.booleans(), st.none(), st.integers(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts, inner, max_size=2)),
    max_leaves=4,
)
arguments = st.one_of(
    st.dictionaries(texts, values, max_size=3), st.just('{"broken": '), st.just("not json")
)
calls = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": names, "arguments": arguments}),
        }
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def conversations(draw):
    """Messages in the form that reading them back gives."""
    messages = []
    for _ in range(draw(st.integers(0, 4))):
        role = draw(st.sampled_from(["user", "system", "assistant", "tools"]))
        name = {"name": draw(names)} if draw(st.booleans()) else {}
        if role in ("user", "system"):
            messages.append({"role": role, **name, "content": draw(texts)})
            continue
        message = {"role": "assistant", **name, "content": draw(texts)}
        if (reasoning := draw(texts)).strip():
            message["reasoning_content"] = reasoning
        if role == "tools":
            message["tool_calls"] = draw(calls)
        messages.append(message)
        for index, call in enumerate(message.get("tool_calls", ()), start=1):
            name = call["function"]["name"]
            result = {"role": "tool", "tool": name, "index": str(index), "content": draw(texts)}
            messages.append(result)
    return messages


tools = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {
                "name": names,
                "description": texts,
                "parameters": st.dictionaries(texts, values, max_size=2),
            }
        ),
    }
)
formats = st.one_of(
    st.none(),
    st.sampled_from(["text", "json_object", {"type": "json_object"}]),
    st.builds(
        lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}},
        st.dictionaries(texts, values, max_size=2),
    ),
)
options = st.fixed_dictionaries(
    {
        "tools": st.one_of(st.none(), st.lists(tools, max_size=2)),
        "thinking": st.booleans(),
        "thinking_effort": st.sampled_from([None, *xtml.EFFORTS]),
        "tool_choice": st.sampled_from([None, "auto", "none", "required"]),
        "response_format": formats,
        "add_generation_prompt": st.booleans(),
    }
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(folder, sample_texts(), 1000)
    write_tokenizer(folder, folder)
    return load_tokenizer(folder)


def rendered_text(messages, **settings_) -> str:
    return "".join(s.text for s in xtml.render(messages, **settings_).segments)


WEATHER = {
    "role": "assistant",
    "content": "One moment.",
    "reasoning_content": "I need the weather.",
    "tool_calls": [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'},
        },
        {"id": "b", "type": "function", "function": {"name": 'say "&"', "arguments": "{oops"}},
    ],
}


def test_the_layout_of_a_conversation_with_thinking_and_tools():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": "Ada", "content": "Weather?"},
        WEATHER,
        {"role": "tool", "tool_call_id": "b", "content": "said"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "sunny"}]},
    ]
    text = rendered_text(messages, thinking_effort=None)
    assert text.replace("<|end_of_msg|>", "\n").split("\n") == [
        '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|>',
        '<|open|>message role="user" name="Ada"<|sep|>Weather?<|close|>message<|sep|>',
        '<|open|>message role="assistant"<|sep|>'
        "<|open|>think<|sep|>I need the weather.<|close|>think<|sep|>"
        "<|open|>response<|sep|>One moment.<|close|>response<|sep|>"
        "<|open|>tools<|sep|>"
        '<|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Zürich<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
        '<|open|>call tool="say &quot;&amp;&quot;" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{oops<|close|>json<|sep|>'
        "<|close|>call<|sep|>"
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        '<|open|>message role="tool" tool="weather" index="1"<|sep|>sunny<|close|>message<|sep|>',
        '<|open|>message role="tool" tool="say &quot;&amp;&quot;" index="2"<|sep|>said'
        "<|close|>message<|sep|>",
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
    ]


def test_without_thinking_no_channel_of_it_appears():
    text = rendered_text([WEATHER], thinking=False, thinking_effort="low")
    assert "think" not in text
    assert text.endswith('<|open|>message role="assistant"<|sep|><|open|>response<|sep|>')


def attached(*places: tuple[str, str, list[int]]) -> Attachment:
    """Stands for an opened picture or film; a place is a text, a label and ids."""
    return Attachment(
        "image", tuple(Place(a, b, SimpleNamespace(ids=ids)) for a, b, ids in places), dict
    )


def test_an_image_has_an_id_for_each_vector_between_its_markers(tokenizer):
    image = {"type": "image", "attachment": attached(("", "image 640x480", [-5, -6, -7]))}
    parts = [{"type": "text", "text": "See:"}, image, {"type": "text", "text": "!"}]
    message = {"role": "user", "content": parts}
    rendered = xtml.render([message], add_generation_prompt=False)
    assert "".join(s.text for s in rendered.messages[0]) == (
        '<|open|>message role="user"<|sep|>See:<|media_begin|>image 640x480<|media_content|>'
        "<|media_pad|><|media_end|>!<|close|>message<|sep|><|end_of_msg|>"
    )
    ids = xtml.encode(rendered.segments, tokenizer)
    pad = tokenizer.convert_tokens_to_ids("<|media_pad|>")
    assert pad not in ids
    at = ids.index(-5)
    assert ids[at : at + 3] == [-5, -6, -7]
    plain = [*ids[:at], pad, *ids[at + 3 :]]
    assert tokenizer.decode(plain) == "".join(s.text for s in rendered.segments)
    read = parse_conversation(plain, tokenizer.table)[-1]
    assert read["content"] == [parts[0], {"type": "image", "width": 640, "height": 480}, parts[2]]


def test_a_clip_has_its_time_before_it():
    clips = attached(("00:00:00.000", "video", [-1]), ("00:00:00.500", "video", [-2]))
    message = {"role": "user", "content": [{"type": "video", "attachment": clips}]}
    text = "".join(s.text for s in xtml.render([message]).messages[0])
    clip = "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    assert f"<|sep|>00:00:00.000{clip}00:00:00.500{clip}<|close|>" in text


def test_pictures_of_tool_results_go_where_the_results_go(tokenizer):
    results = [
        {
            "role": "tool",
            "tool_call_id": name,
            "content": [{"type": "image", "attachment": attached(("", f"image {n}x1", [-n]))}],
        }
        for name, n in (("b", 2), ("a", 1))
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for name in ("a", "b")
    ]
    conversation = [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    ids = xtml.encode(xtml.render(conversation).segments, tokenizer)
    assert [i for i in ids if i < 0] == [-1, -2]


@settings(max_examples=300, deadline=None)
@given(messages=conversations(), options=options)
def test_nothing_that_is_written_becomes_a_control_token(tokenizer, messages, options):
    segments = xtml.render(messages, **options).segments
    ids = xtml.encode(segments, tokenizer)
    control = tokenizer.table.control
    assert [control[i] for i in ids if i in control] == [s.text for s in segments if s.is_control]
    assert tokenizer.decode(ids) == "".join(s.text for s in segments)
    assert {s.text for s in segments if s.is_control} <= set(xtml.MARKERS)


@settings(max_examples=300, deadline=None)
@given(messages=conversations(), options=options)
def test_reading_a_rendered_conversation_gives_it_back(tokenizer, messages, options):
    options = {**options, "thinking": True}
    ids = xtml.encode(xtml.render(messages, **options).segments, tokenizer)
    read = parse_conversation(ids, tokenizer.table)
    assert [message for message in read if "type" not in message] == messages
    if options["tools"]:
        declared = read[0]["content"].partition("```json\n")[2].removesuffix("\n```")
        assert (read[0]["type"], json.loads(declared)) == ("tool-declare", options["tools"])


def _mlx_vlm_renderer():
    """mlx-vlm's module for this format, by its file: the package itself loads much more."""
    package = importlib.util.find_spec("mlx_vlm")
    if package is None:
        pytest.skip("pip install --no-deps mlx-vlm==0.7.10")
    path = Path(package.submodule_search_locations[0]) / "models" / "kimi_k3" / "encoding_k3.py"
    spec = importlib.util.spec_from_file_location("mlx_vlm_encoding_k3", path)
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks itself up among the loaded modules.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@st.composite
def openai_conversations(draw):
    """As clients send them: arguments as JSON text, results in any order, parts, absent fields."""
    messages = []
    for message in draw(conversations()):
        message = {k: v for k, v in message.items() if k != "index"}
        if isinstance(message["content"], str) and draw(st.booleans()):
            message["content"] = draw(
                st.sampled_from([None, [], [{"type": "text", "text": message["content"]}]])
            )
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call-{number}"
            function = call["function"]
            if isinstance(function["arguments"], dict) and draw(st.booleans()):
                function["arguments"] = json.dumps(function["arguments"])
        messages.append(message)
    results = [m for m in messages if m["role"] == "tool"]
    for number, message in enumerate(results):
        style = draw(st.sampled_from(["id", "order", "name"]))
        if style == "id":
            message["tool_call_id"] = f"call-{draw(st.integers(0, 2))}"
        if style != "name":
            message["tool"] = message["tool"] if number % 2 else message.pop("tool")
    if draw(st.booleans()):
        messages.append({"role": "system", "tools": draw(st.lists(tools, min_size=1, max_size=2))})
    return messages


@settings(max_examples=400, deadline=None)
@given(messages=openai_conversations(), options=options)
def test_it_renders_as_mlx_vlm_does(tokenizer, messages, options):
    theirs = _mlx_vlm_renderer().build_chat_segments(messages, **options)
    wanted = []
    for segment in theirs:
        wanted += tokenizer.encode(
            segment.text, add_special_tokens=False, split_special_tokens=not segment.allow_special
        )
    assert xtml.encode(xtml.render(messages, **options).segments, tokenizer) == wanted


def test_results_that_answer_no_call_stay_in_their_order():
    results = [
        {"role": "tool", "tool_call_id": "b", "content": "second"},
        {"role": "tool", "tool_call_id": "unknown", "tool": "other", "content": "first"},
    ]
    text = rendered_text([WEATHER, *results])
    assert text.index("second") < text.index("first")
    assert 'tool="weather" index="1"<|sep|>second' in text


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (["hello"], {}, "not an object"),
        ([{"content": "x"}], {}, "role None"),
        ([{"role": "developer", "content": "x"}], {}, "role 'developer'"),
        ([{"role": "user", "content": 3}], {}, "content is a int"),
        ([{"role": "user", "content": [{"type": "audio"}]}], {}, "type 'audio'"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "no picture for it was given"),
        ([{"role": "tool", "content": "x"}], {}, "answers no call"),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, "no function name"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}],
            {},
            "not a JSON object",
        ),
        ([], {"thinking_effort": "medium"}, "can be low, high, max"),
        ([], {"tool_choice": "maybe"}, "tool_choice 'maybe'"),
        ([], {"response_format": "xml"}, "response_format 'xml'"),
        ([], {"response_format": {"type": "json_schema"}}, "has no schema"),
    ],
)
def test_what_has_no_place_in_the_format_is_refused(messages, options, message):
    with pytest.raises(K3Error, match=message):
        xtml.render(messages, **options)


def test_half_a_surrogate_pair_is_replaced_as_tiktoken_does(tokenizer):
    assert tokenizer.decode(xtml.encode_text("a\ud83d\ude00 \ud83d!", tokenizer)) == "a😀 \ufffd!"


def test_the_tokenizer_renders_for_mlx_lms_server(tokenizer):
    messages = [{"role": "user", "content": "<|end_of_msg|>"}]
    rendered = xtml.render(messages).segments
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == xtml.encode(
        rendered, tokenizer
    )
    # mlx-lm calls the switch by another name.
    ids = tokenizer.apply_chat_template(messages, enable_thinking=False)
    assert tokenizer.decode(ids).endswith("<|open|>response<|sep|>")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "".join(s.text for s in rendered)
    with pytest.raises(UnsupportedError, match="no option documents"):
        tokenizer.apply_chat_template(messages, documents=[])


# Reading an answer as it comes.


def read(tokenizer, text_with_markers: str, channel="think"):
    """Feed an answer written with its markers; returns the parser and all events."""
    ids = tokenizer.encode(text_with_markers, split_special_tokens=False)
    parser = ReplyParser(tokenizer.table, channel)
    events = [event for i in ids for event in parser.feed(i)]
    return parser, events + parser.finish()


def joined(events, kind) -> str:
    return "".join(event.text for event in events if event.kind == kind)


def test_an_answer_lacks_the_opening_that_the_prompt_wrote(tokenizer):
    parser, events = read(
        tokenizer,
        "Hm, 月😀.<|close|>think<|sep|><|open|>response<|sep|>Yes <b>&amp;</b> 😀!"
        "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    )
    assert joined(events, "reasoning") == "Hm, 月😀."
    assert joined(events, "content") == "Yes <b>&amp;</b> 😀!"
    assert parser.ended
    assert parser.message == {
        "role": "assistant",
        "content": "Yes <b>&amp;</b> 😀!",
        "reasoning_content": "Hm, 月😀.",
    }


def test_thinking_that_is_cut_off_is_no_answer(tokenizer):
    parser, _ = read(tokenizer, "I should first")
    assert parser.message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I should first",
    }


def test_tool_calls_come_as_start_arguments_and_end(tokenizer):
    parser, events = read(
        tokenizer,
        "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f&quot;" index="1"<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>42<|close|>argument<|sep|>'
        '<|open|>argument key="s" type="string"<|sep|>42<|close|>argument<|sep|>'
        '<|open|>argument key="bad" type="object"<|sep|>{<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{"a": [1]}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
    )
    first, second = parser.message["tool_calls"]
    assert first["function"] == {"name": 'f"', "arguments": {"n": 42, "s": "42", "bad": "{"}}
    assert second["function"] == {"name": "g", "arguments": {"a": [1]}}
    starts = [(e.text, e.index) for e in events if e.kind == "tool_start"]
    assert starts == [('f"', 1), ("g", 2)]
    pieces = [(e.index, e.key) for e in events if e.kind == "tool_argument"]
    assert set(pieces) == {(1, "n"), (1, "s"), (1, "bad"), (2, None)}
    assert [e.call for e in events if e.kind == "tool_end"] == [first, second]


def test_a_call_that_is_cut_off_is_not_made(tokenizer):
    parser, _ = read(
        tokenizer,
        '<|open|>tools<|sep|><|open|>call tool="rm" index="1"<|sep|>'
        '<|open|>argument key="path" type="string"<|sep|>/',
        "response",
    )
    assert "tool_calls" not in parser.message


@pytest.mark.parametrize(
    ("answer", "reasoning", "content"),
    [
        ("a<|open|>response<|sep|>b<|end_of_msg|>", "a", "b"),  # think is not closed
        ("a<|close|>think<|sep|>b<|end_of_msg|>", "a", "b"),  # response is not opened
        ("a<|close|>tools<|sep|>b<|end_of_msg|>", "ab", ""),  # closes what is not open
        ("a<|open|>b<|close|>think<|sep|>c", "a", "c"),  # a tag that never ends
        ("a<|open|>b<|sep|>c", "ac", ""),  # an unknown tag
        ("a<|sep|>b", "ab", ""),
        ("a<|media_pad|>[BOS]b", "ab", ""),
        ("a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>c", "a", "b"),
        ("a<|close|>message<|sep|>b<|end_of_msg|>c", "a", ""),
        ('a<|open|>message role="user"<|sep|>b', "a", ""),  # runs on into another turn
    ],
)
def test_faulty_markup_loses_no_text_and_forges_none(tokenizer, answer, reasoning, content):
    message = read(tokenizer, answer)[0].message
    assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_at_all_are_read_and_events_add_up_to_the_message(tokenizer, data):
    count = len(tokenizer.table.pieces)
    markers = tokenizer.encode("".join(xtml.MARKERS), split_special_tokens=False)
    words = [tokenizer.encode(w) for w in ("think", "response", "tools", 'call tool="x"', "json")]
    piece = st.one_of(
        st.integers(0, count - 1).map(lambda i: [i]),
        st.sampled_from(markers).map(lambda i: [i]),
        st.sampled_from(words),
    )
    ids = [i for ids in data.draw(st.lists(piece, max_size=40)) for i in ids]
    parser = ReplyParser(tokenizer.table, data.draw(st.sampled_from(["think", "response", None])))
    events: list[Event] = [e for i in ids for e in parser.feed(i)] + parser.finish()
    assert joined(events, "content") == parser.message["content"]
    assert joined(events, "reasoning") == parser.message.get("reasoning_content", "")
    ends = [event.call for event in events if event.kind == "tool_end"]
    assert ends == parser.message.get("tool_calls", [])
    parse_conversation(ids, tokenizer.table)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), thinking=st.booleans())
def test_an_answer_cut_anywhere_is_completed_to_a_whole_message(tokenizer, data, thinking):
    message = {"role": "assistant", "content": data.draw(texts)}
    if thinking:
        message["reasoning_content"] = data.draw(texts)
    rendered = xtml.render([message], thinking=thinking, add_generation_prompt=False).messages[0]
    whole = xtml.encode(rendered, tokenizer)
    opening = xtml.encode(xtml.reply_opening(thinking), tokenizer)
    assert whole[: len(opening)] == opening
    cut = data.draw(st.integers(len(opening), len(whole)))
    parser = ReplyParser(tokenizer.table, "think" if thinking else "response")
    for i in whole[len(opening) : cut]:
        parser.feed(i)
    parser.finish()
    ending = parser.closing()
    if ending is None:
        assert xtml.SEP not in tokenizer.decode(whole[cut - 1 : cut])
        return
    ids = whole[:cut] + xtml.encode(ending, tokenizer)
    assert parse_conversation(ids, tokenizer.table) == [parser.message]
    assert tokenizer.decode(ids).count("<|end_of_msg|>") == 1 + tokenizer.decode(
        [i for i in ids if i not in tokenizer.table.control]
    ).count("<|end_of_msg|>")
