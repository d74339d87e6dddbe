"""Pictures on the command line: generate --image, /image in a chat, files dropped onto a line."""

import io
import json
import struct
import sys
import zlib

import av
import pytest

from mlx_k3 import generate as generate_in_python
from mlx_k3 import load
from mlx_k3.cli import main
from mlx_k3.cli.pictures import dropped, named_file

from .support.seeing import photo, png, seeing_model
from .test_cli_chat import Terminal

SHORT = ("--max-tokens", "8", "--no-thinking")


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    return seeing_model(golden, tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs mlx-k3 in this process, with lines to type."""
    monkeypatch.setattr("typer.get_app_dir", lambda name: str(tmp_path / "data" / name))
    monkeypatch.setattr("mlx_k3.cli.prompts.prompts_folder", lambda: tmp_path / "prompts")

    def run(*arguments, lines: tuple[str, ...] = ()):
        monkeypatch.setattr(sys, "argv", ["mlx-k3", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def pictures(tmp_path):
    """Two photos, and files that are none."""
    (tmp_path / "one.png").write_bytes(png(photo(1)))
    (tmp_path / "my two.png").write_bytes(png(photo(2)))
    (tmp_path / "half.png").write_bytes(png(photo())[:800])
    (tmp_path / "text.jpg").write_text("Dear diary")
    (tmp_path / "bomb.png").write_bytes(empty_png(50_000, 50_000))
    (tmp_path / "zero.png").write_bytes(empty_png(0, 9))
    (tmp_path / "broken.mp4").write_bytes(bytes(5000))
    with av.open(str(tmp_path / "nothing.avi"), "w") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuvj420p"
        container.start_encoding()
    return tmp_path


def empty_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_generate_sees_what_python_sees(command, folder, pictures):
    images = (pictures / "one.png", pictures / "my two.png")
    options = ("--image", images[0], "--image", images[1], "--prompt", "Compare.", *SHORT)
    code, out, _ = command("generate", folder, *options, "--json")
    assert code == 0
    expected = generate_in_python(
        *load(folder), "Compare.", images=images, max_tokens=8, thinking=False
    )
    assert json.loads(out)["text"] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--image", "half.png"), "is damaged or cut off"),
        (("--image", "text.jpg"), "text.jpg is no picture"),
        (("--image", "bomb.png"), "pixels"),
        (("--image", "zero.png"), "zero.png"),
        (("--image", "none.png"), "no such file"),
        (("--video", "nothing.avi"), "nothing.avi"),
        (("--video", "broken.mp4"), "is no video"),
        (("--image", "one.png") * 50, "50 pictures and videos are too many"),
        (("--image", "one.png", "--no-vision"), "--no-vision"),
        (("--image", "one.png", "--raw"), "--raw"),
    ],
)
def test_what_cannot_be_seen_is_one_line_and_exit_code_2(
    command, folder, pictures, options, message
):
    options = [pictures / o if (pictures / o).suffix else o for o in options]
    options = options if "--raw" in options else [*options, "--no-thinking"]
    code, out, err = command("generate", folder, "--prompt", "What is this?", *options)
    assert (code, out) == (2, "")
    assert err.startswith("mlx-k3: ") and err.count("\n") == 1 and message in err


def test_a_model_that_reads_text_only_says_so_before_it_is_loaded(command, golden, pictures):
    image = ("--image", pictures / "one.png")
    for model, prompt in (
        (golden / "tiny-kimi-linear", ("--ids", "1,2")),
        (golden / "tiny-text", ("--prompt", "What is this?")),
    ):
        code, _, err = command("generate", model, *prompt, *image)
        assert code == 2 and "reads text only" in err
    code, _, err = command("generate", golden / "tiny-text", "--ids", "1", "--no-vision")
    assert code == 2


def test_a_chat_shows_pictures_with_the_next_message(command, folder, pictures):
    talk = pictures / "talk.json"
    lines = (
        f"/image {pictures / 'one.png'}",
        f"/image '{pictures / 'my two.png'}'",
        "Compare.",
        "And now?",
        f"/save {talk}",
    )
    code, _, err = command("chat", folder, "--temp", "0", *SHORT, lines=lines)
    assert code == 0
    assert f"{pictures / 'my two.png'}: 6 tokens, with your next message" in err
    first, answer, second, _ = json.loads(talk.read_text())["messages"]
    assert [part["type"] for part in first["content"]] == ["image_url", "image_url", "text"]
    assert (first["content"][2]["text"], second["content"]) == ("Compare.", "And now?")
    expected = generate_in_python(
        *load(folder),
        "Compare.",
        images=[photo(1), photo(2)],
        max_tokens=8,
        thinking=False,
    )
    assert answer["content"] == expected
    # Taken up, shown to another question.
    lines = (f"/load {talk}", "/retry", "/retry Why?", f"/save {talk}")
    assert command("chat", folder, "--temp", "0", *SHORT, lines=lines)[0] == 0
    assert json.loads(talk.read_text())["messages"][0] == first


def test_another_question_about_the_same_picture(command, folder, pictures):
    talk = pictures / "talk.json"
    lines = (f"/image {pictures / 'one.png'}", "What?", "/retry Why?", f"/save {talk}")
    assert command("chat", folder, "--temp", "0", *SHORT, lines=lines)[0] == 0
    question, _ = json.loads(talk.read_text())["messages"]
    assert [part["type"] for part in question["content"]] == ["image_url", "text"]
    assert question["content"][1]["text"] == "Why?"


@pytest.mark.parametrize(
    ("line", "message"),
    [("/image", "/image needs a file"), ("/image none.png", "no such file"), ("/video x", "x")],
)
def test_mistakes_in_a_chat(command, folder, line, message):
    code, _, err = command("chat", folder, lines=(line,))
    assert code == 2 and message in err


def test_a_chat_without_eyes(command, folder, pictures):
    lines = (f"/image {pictures / 'one.png'}",)
    code, _, err = command("chat", folder, "--no-vision", lines=lines)
    assert code == 2 and "leave out --no-vision" in err


def test_files_that_are_dropped_onto_a_line(pictures):
    one, two = str(pictures / "one.png"), str(pictures / "my two.png")
    escaped = two.replace(" ", r"\ ")
    film = str(pictures / "broken.mp4")
    for line, expected in {
        f"{one} ": ("", [one], []),
        f"{escaped} what's this?": ("what's this?", [two], []),
        f"'{two}' '{one}'": ("", [two, one], []),
        f'Compare "{two}" with {one}.': (f"Compare   with {one}.", [two], []),
        f"What is in {one}\nand why?": ("What is in  \nand why?", [one], []),
        f"{film} Watch.": ("Watch.", [], [film]),
        "one.png": ("one.png", [], []),
        "/no/such/file.png": ("/no/such/file.png", [], []),
        str(pictures): (str(pictures), [], []),
        f"see{one}": (f"see{one}", [], []),
        "  /usr/bin is a folder ": ("  /usr/bin is a folder ", [], []),
        "~nobody/x.png it's \\ odd": ("~nobody/x.png it's \\ odd", [], []),
    }.items():
        assert dropped(line) == expected, line
    assert named_file(escaped, "/image") == named_file(f'"{two}"', "/image") == two
    assert named_file(two, "/image") == two


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_picture_dropped_onto_a_terminal(folder, pictures):
    talk = pictures / "talk.json"
    terminal = Terminal(pictures, folder, "--temp", "0", *SHORT)
    try:
        terminal.expect("lists the commands")
        terminal.expect(">")
        terminal.type(str(pictures / "my two.png").replace(" ", r"\ ") + " \r")
        terminal.expect("6 tokens, with your next message.+>")
        terminal.type(f"What is this? {pictures / 'one.png'}\r")
        terminal.expect("cut at 8 tokens.+>")
        terminal.type(f"{pictures / 'text.jpg'} Look!\r")
        terminal.expect("is no picture.+>")
        terminal.type(f"/save {talk}\r")
        terminal.expect("2 messages in.+>")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
    content = json.loads(talk.read_text())["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert content[2]["text"] == "What is this?"
