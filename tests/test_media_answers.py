"""Answers about pictures: in Python and in conversations, cached, saved, and on demand."""

import io
import json
import random
import subprocess
import sys

import av
import pytest
from PIL import Image
from safetensors.numpy import load_file

from mlx_k3 import K3Error, UnsupportedError, generate, load
from mlx_k3.chat.prompt_cache import PromptCache
from mlx_k3.chat.session import Session, stream_generate
from mlx_k3.media.attachments import MAX_ATTACHMENTS
from mlx_k3.media.processor import Processor
from mlx_k3.units import parse_bytes

from .support.models import convert_golden
from .support.seeing import parts, photo, png, seeing_model

SHORT = {"max_tokens": 12, "thinking": False}


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    return seeing_model(golden, tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def loaded(folder):
    return load(folder)


def reply(loaded, prompt, **options):
    *_, last = stream_generate(*loaded, prompt, **(SHORT | options))
    return last.reply


def talk(loaded, **options) -> Session:
    return Session(*loaded, thinking=False, **options)


def say(session: Session, text, **options):
    *_, last = session.turn(text, max_tokens=8, **options)
    return last.reply


def film(frames) -> bytes:
    """A film of eight frames a second that loses nothing; a number is a :func:`photo`."""
    frames = [photo(frame) if isinstance(frame, int) else frame for frame in frames]
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=8)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def test_ids_with_a_picture_or_a_film_give_the_reference_s_next_token(golden, tmp_path):
    model, _ = load(convert_golden(golden, "tiny-multimodal", tmp_path))
    data = load_file(golden / "tiny-multimodal" / "expected.safetensors")
    shown = {"image": {"images": [data["media.image0.rgb"]]}}
    shown["clip"] = {"videos": [film(data["media.clip.rgb"])]}
    for name, media in shown.items():
        ids = data[f"prompt.{name}.input_ids"][0].tolist()
        best = int(data[f"prompt.{name}.logits"][0, -1].argmax())
        assert generate(model, None, ids, max_tokens=1, **media) == [best]
        with pytest.raises(K3Error, match="places for 1 pictures and 2 are given"):
            generate(model, None, ids, images=[photo(), photo()], max_tokens=1)


def test_a_file_bytes_a_pillow_image_and_an_array_are_answered_alike(loaded, tmp_path):
    path = tmp_path / "a photo.png"
    path.write_bytes(png(photo()))
    sources = (path, str(path), path.read_bytes(), Image.fromarray(photo()), photo())
    replies = [reply(loaded, "What is this?", images=[source]) for source in sources]
    assert all(r.ids == replies[0].ids for r in replies)
    message = [{"role": "user", "content": parts("What is this?", path)}]
    assert reply(loaded, message).ids == replies[0].ids
    waiting = [{"role": "user", "content": [{"type": "image"}, parts("What is this?")[0]]}]
    assert reply(loaded, waiting, images=[path]).ids == replies[0].ids
    # And it looks: another picture, another answer, and as many places as there are vectors.
    assert reply(loaded, "What is this?", images=[photo(1)]).ids != replies[0].ids
    blind = reply(loaded, "What is this?")
    assert blind.ids != replies[0].ids
    label = len("image 60x40") + 3
    assert replies[0].prompt_tokens == blind.prompt_tokens + label + 6


def test_how_many_tokens_a_picture_takes():
    size = Processor().size
    assert [size(4000, 3000).tokens, size(640, 480).tokens, size(28, 28).tokens] == [15_444, 414, 1]


def test_the_order_of_pictures_counts(loaded):
    one, two = photo(1), photo(2)
    assert (
        reply(loaded, "Compare.", images=[one, two]).ids
        != reply(loaded, "Compare.", images=[two, one]).ids
    )


def test_a_film_is_clips_with_their_times(loaded):
    eight = reply(loaded, "What happens?", videos=[film(range(8))])
    blind = reply(loaded, "What happens?")
    clip = len("00:00:00.000") + len("video") + 3 + 6
    assert eight.prompt_tokens == blind.prompt_tokens + 2 * clip
    backwards = reply(loaded, "What happens?", videos=[film(reversed(range(8)))])
    assert backwards.prompt_tokens == eight.prompt_tokens
    assert backwards.ids != eight.ids


def test_pictures_beside_tools_and_a_system_message(loaded):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": parts("What is there?", photo(1))},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": parts("seen", photo(2))},
    ]
    first = reply(loaded, messages, tools=[tool])
    assert first.ids == reply(loaded, messages, tools=[tool]).ids
    messages[-1] = messages[-1] | {"content": parts("seen", photo(3))}
    assert reply(loaded, messages, tools=[tool]).ids != first.ids


def test_a_conversation_goes_on_from_a_picture_without_seeing_it_again(
    loaded, monkeypatch, tmp_path
):
    model, _ = loaded
    session = talk(loaded, prompts=PromptCache(model, "2" * 32))
    say(session, "What is this?", images=[photo(1)])
    looks, encode = [], model.vision.encode
    monkeypatch.setattr(model.vision, "encode", lambda *a: looks.append(a) or encode(*a))
    second = say(session, "And now?", images=[photo(2)])
    session.save(tmp_path / "talk.json")
    third = say(session, "And the first?")
    assert len(looks) == 1
    assert second.cached_tokens > 60 and third.cached_tokens > second.cached_tokens
    # As if all of it were read at once.
    fresh = talk(loaded)
    fresh.load(tmp_path / "talk.json")
    at_once = say(fresh, "And the first?")
    assert (at_once.cached_tokens, len(looks)) == (0, 3)
    assert (at_once.prompt_tokens, at_once.ids) == (third.prompt_tokens, third.ids)


def test_a_prompt_cache_never_takes_one_picture_for_another(loaded):
    model, tokenizer = loaded
    prompts = PromptCache(model, "0" * 32)

    def ask(image):
        *_, last = stream_generate(
            model, tokenizer, "What is this?", images=[image], prompts=prompts, **SHORT
        )
        return last.reply

    first = ask(photo(1))
    assert first.cached_tokens == 0
    again = ask(photo(1).copy())
    assert again.cached_tokens == again.prompt_tokens - 1
    assert again.ids == first.ids
    # One dot differs, and only what comes before the picture is the same.
    other = photo(1)
    other[5, 5] ^= 255
    changed = ask(other)
    assert changed.cached_tokens < first.prompt_tokens - 20
    assert changed.ids == reply(loaded, "What is this?", images=[other]).ids


def test_random_conversations_about_a_few_pictures(loaded):
    """With a cache that all share, each is answered as if nothing had been read before."""
    model, _ = loaded
    prompts, rng = PromptCache(model, "3" * 32), random.Random(2)
    kept = 0
    for _ in range(20):
        messages = []
        for turn in range(rng.randint(1, 3)):
            shown = [
                photo(rng.randrange(2), 28 * rng.choice([1, 2]))
                for _ in range(rng.choice([0, 1, 1, 2]))
            ]
            messages.append({"role": "user", "content": parts(rng.choice("ab"), *shown)})
            messages.append({"role": "assistant", "content": f"answer {turn}"})
        messages.pop()
        expected = reply(loaded, messages, max_tokens=4)
        cached = reply(loaded, messages, max_tokens=4, prompts=prompts)
        assert (cached.ids, cached.prompt_tokens) == (expected.ids, expected.prompt_tokens)
        kept += cached.cached_tokens
    assert kept > 20 * 30


def test_kept_on_the_disk_a_picture_is_known_again(loaded, tmp_path, monkeypatch):
    model, tokenizer = loaded

    def ask():
        prompts = PromptCache(model, "1" * 32, memory_bytes=0, folder=tmp_path, disk_bytes=None)
        *_, last = stream_generate(
            model, tokenizer, "What is this?", images=[photo(1)], prompts=prompts, **SHORT
        )
        return last.reply

    first = ask()
    monkeypatch.setattr(model.vision, "encode", lambda *_: pytest.fail("it was looked at again"))
    again = ask()
    assert again.cached_tokens == first.prompt_tokens - 1
    assert again.ids == first.ids


def test_a_saved_conversation_has_its_pictures(loaded, folder, tmp_path):
    file, path = tmp_path / "film.mkv", tmp_path / "talk.json"
    file.write_bytes(film(range(3)))
    session = talk(loaded)
    say(session, "One", images=[png(photo(1)), photo(2)])
    say(session, "Two", videos=[file])
    session.save(path)
    json.loads(path.read_text())  # plain JSON
    resumed = talk(loaded)
    resumed.load(path)
    expected = say(session, "Three")
    assert say(resumed, "Three").ids == expected.ids
    assert resumed.reply.prompt_tokens == expected.prompt_tokens

    file.write_bytes(film(range(1, 4)))
    with pytest.raises(K3Error, match=r"film\.mkv is not the video any more"):
        talk(loaded).load(path)
    file.unlink()
    with pytest.raises(K3Error, match=r"film\.mkv: there is no such file"):
        talk(loaded).load(path)
    with pytest.raises(UnsupportedError, match="--no-vision"):
        talk(load(folder, vision=False)).load(path)


def test_a_question_taken_back_takes_its_picture_with_it(loaded):
    session = talk(loaded)
    first = say(session, "What is this?", images=[photo(1)])
    question = session.take_back()
    assert [len(session.shown(question)), session.messages] == [1, []]
    assert say(session, question).ids == first.ids


@pytest.mark.parametrize("prompt_tokens", [5, 64])
def test_experts_on_demand_see_the_same(folder, loaded, prompt_tokens):
    model, tokenizer = load(folder)
    need = load_plan(folder)
    offloaded, _ = load(folder, memory=need)
    try:
        assert offloaded.offload is not None
        # Steps that end inside a picture as well as one step for all.
        options = {"prefill_step_size": prompt_tokens, "images": [photo(1), photo(2)]}
        expected = reply((model, tokenizer), "Compare.", **options)
        assert reply((offloaded, tokenizer), "Compare.", **options).ids == expected.ids
        assert reply(loaded, "Compare.", images=[photo(1), photo(2)]).ids == expected.ids
    finally:
        offloaded.offload.close()


def load_plan(folder) -> int:
    """The least memory that experts on demand need, and a little."""
    from mlx_k3.loader import plan_load

    return plan_load(folder, None).minimum_bytes + parse_bytes("20kB")


def test_a_model_without_a_tower_says_so(folder, golden, tmp_path):
    blind = load(folder, vision=False)
    with pytest.raises(UnsupportedError, match="--no-vision"):
        reply(blind, "What is this?", images=[photo()])
    linear, _ = load(convert_golden(golden, "tiny-kimi-linear", tmp_path))
    with pytest.raises(UnsupportedError, match="reads text only"):
        generate(linear, None, [1, 2], images=[photo()])
    assert reply(blind, "Hello").ids


def test_how_many_pictures_there_may_be(loaded):
    many = [photo()] * (MAX_ATTACHMENTS + 1)
    with pytest.raises(K3Error, match=f"at most {MAX_ATTACHMENTS}"):
        reply(loaded, "Look.", images=many)
    with pytest.raises(K3Error, match=f"at most {MAX_ATTACHMENTS}"):
        reply(loaded, [{"role": "user", "content": parts("Look.", *many)}])
    session = talk(loaded)
    say(session, "One", images=[photo(width=28, height=28)])
    with pytest.raises(K3Error, match=f"at most {MAX_ATTACHMENTS}"):
        session.turn("Two", images=many[1:])
    assert len(session.messages) == 2  # it goes on
    say(session, "Two")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, r"messages\[0\]\.content\[0\] is an image part without a source"),
        ({"type": "image", "image": "/none.png"}, r"/none\.png: there is no such file"),
        ({"type": "image", "image": b"text"}, r"messages\[0\]\.content\[0\] is no picture"),
        ({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}, "is not fetched"),
        ({"type": "video", "video": photo()}, "is a ndarray"),
        ({"type": "image", "attachment": {"places": []}}, "without a source"),
    ],
)
def test_parts_that_cannot_be_seen(loaded, part, message):
    with pytest.raises(K3Error, match=message):
        reply(loaded, [{"role": "user", "content": [part]}])


def test_pictures_that_have_no_place(loaded):
    with pytest.raises(K3Error, match="1 more pictures"):
        reply(loaded, [{"role": "user", "content": "Hello"}], images=[photo()])
    with pytest.raises(UnsupportedError, match="raw"):
        reply(loaded, "Once", raw=True, images=[photo()])


def test_without_pillow_and_pyav_text_works_and_pictures_name_the_extra():
    code = """
import sys
sys.modules["PIL"] = sys.modules["av"] = None
from mlx_k3 import generate, load, nano, UnsupportedError
from mlx_k3.media.images import open_image
from mlx_k3.media.video import open_video
import mlx_k3.cli, mlx_k3.server.app
model, tokenizer = load(nano.converted())
print(generate(model, tokenizer, "What is 4 + 5?"))
for open_ in (open_image, lambda data: open_video(data, fps=1, frames_per_clip=1)):
    try:
        open_(b"x")
    except UnsupportedError as e:
        print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    answer, *told = done.stdout.splitlines()
    assert answer == "4 + 5 = 9."
    assert len(told) == 2
    assert all(line.endswith("pip install 'mlx-k3[vision]'") for line in told)
