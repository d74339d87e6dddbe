"""The tower as part of a model: converted, loaded when needed, merged into prompts, planned."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from typer.testing import CliRunner

from mlx_k3 import load
from mlx_k3.chat.generation import Sampling, run
from mlx_k3.chat.plain import IdsOnly, PlainParser
from mlx_k3.chat.prompt_cache import PromptCache
from mlx_k3.checkpoint.index import LocalFolder, open_checkpoint
from mlx_k3.cli import app
from mlx_k3.config import K3Config
from mlx_k3.errors import CheckpointError, K3Error, UnsupportedError
from mlx_k3.experts import vision_sizes
from mlx_k3.experts.budget import plan_folder
from mlx_k3.loader import plan_load, require_vision
from mlx_k3.media.placing import expand
from mlx_k3.media.processor import Processor
from mlx_k3.models import vision, vision_attention
from mlx_k3.models.embeddings import PromptEmbeddings

from .support.models import convert_golden
from .support.pictures import PROMPTS, golden_arrays, golden_media, noise, relative_error

PAD = 505
TOKENS = 6


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    return convert_golden(golden, "tiny-multimodal", tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)[0]


@pytest.fixture(scope="module")
def arrays(golden):
    return golden_arrays(golden)


@pytest.fixture(scope="module")
def media(golden):
    return golden_media(golden)


class Watched:
    """Eyes that note what they look at."""

    def __init__(self, eyes):
        self._eyes, self.seen = eyes, []

    def encode(self, medium, *args):
        self.seen.append(medium)
        return self._eyes.encode(medium, *args)


@pytest.fixture
def eyes(model, monkeypatch):
    watched = Watched(model.vision)
    monkeypatch.setattr(model, "vision", watched)
    return watched


def golden_prompt(arrays, media, name):
    shown = [media[medium] for medium in PROMPTS[name]]
    return expand(arrays[f"prompt.{name}.input_ids"][0].tolist(), shown, PAD), shown


def answer(model, ids, shown, *, prompts=None, **options):
    """Generated ids, and the log-probabilities of the first."""
    tokenizer = IdsOnly()
    parser, sampling = PlainParser(tokenizer), Sampling(TOKENS, options=options)
    chunks = list(run(model, tokenizer, ids, parser, sampling, prompts=prompts, media=shown))
    return [chunk.token for chunk in chunks], np.array(chunks[0].logprobs), chunks[-1].reply


def golden_answer(arrays, name):
    logits = arrays[f"prompt.{name}.logits"][0, -1].astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def test_the_package_holds_the_tower_unchanged(golden, folder):
    files = open_checkpoint(LocalFolder(folder)).files
    source = {}
    for shard in (golden / "tiny-multimodal").glob("*.safetensors"):
        source |= mx.load(str(shard)) if shard.name != "expected.safetensors" else {}
    names = [name for name in source if name.startswith(("vision_tower.", "mm_projector."))]
    assert len(names) == 24
    for name in names:
        assert files[name] == "model-vision-00001-of-00001.safetensors"
        stored = mx.load(str(folder / files[name]))[name]
        assert stored.dtype == mx.bfloat16 and (stored == source[name]).all()
    theirs = json.loads((golden / "tiny-multimodal/preprocessor_config.json").read_text())
    assert json.loads((folder / "preprocessor_config.json").read_text()) == theirs


def test_mlx_lm_opens_the_package(folder, arrays, model):
    stock, _ = mlx_lm.utils.load_model(folder)
    stock.set_dtype(mx.float32)
    ids = mx.array(arrays["prompt.image.input_ids"])
    assert relative_error(stock(ids), model(ids)) < 1e-4


@pytest.mark.parametrize("name", PROMPTS)
def test_merged_embeddings_and_logits_match_golden(model, arrays, media, name):
    ids, shown = golden_prompt(arrays, media, name)
    embeddings = PromptEmbeddings(model.model.embed_tokens, model.vision.encode, ids, shown)
    assert len(embeddings) == len(ids)
    merged = embeddings[None]
    assert relative_error(merged, arrays[f"prompt.{name}.inputs_embeds"]) <= 1e-5
    cache = model.make_cache()
    logits = model(mx.full((1, len(ids)), PAD), cache, merged)
    assert relative_error(logits, arrays[f"prompt.{name}.logits"]) <= 1e-4
    for t, token in enumerate(arrays[f"prompt.{name}.decode_ids"][0].tolist()):
        logits = model(mx.array([[token]]), cache)
        want = arrays[f"prompt.{name}.decode_logits"][0, t]
        assert relative_error(logits[0, 0], want) <= 1e-4


@pytest.mark.parametrize("cuts", [[1], [3, 4, 9], [*range(1, 29)]], ids=str)
def test_embeddings_in_pieces_equal_the_whole(model, eyes, arrays, media, cuts):
    ids, shown = golden_prompt(arrays, media, "mixed")
    rest = PromptEmbeddings(model.model.embed_tokens, eyes.encode, ids, shown[::-1])
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        pieces.append(rest[: stop - start][None])
        rest = rest[stop - start :]
    assert len(rest) == 0
    whole = mx.concatenate(pieces, axis=1)
    assert relative_error(whole, arrays["prompt.mixed.inputs_embeds"]) <= 1e-5
    assert eyes.seen == shown  # each once, when its turn comes


@pytest.mark.parametrize("step", [1, 5, 13, 2048])
@pytest.mark.parametrize("name", PROMPTS)
def test_answers_match_golden_whatever_the_window(model, arrays, media, name, step):
    ids, shown = golden_prompt(arrays, media, name)
    _, logprobs, reply = answer(model, ids, shown, prefill_step_size=step)
    assert relative_error(logprobs, golden_answer(arrays, name)) <= 1e-4
    assert reply.prompt_tokens == len(ids) == arrays[f"prompt.{name}.logits"].shape[1]


@pytest.mark.parametrize("name", PROMPTS)
def test_experts_on_demand_give_the_same_answer(folder, model, arrays, media, name):
    ids, shown = golden_prompt(arrays, media, name)
    want, logprobs, _ = answer(model, ids, shown)
    offloaded, _ = load(folder, memory=plan_folder(folder, None).minimum_bytes)
    assert offloaded.offload is not None and offloaded.vision is not None
    told = []
    got, same, _ = answer(
        offloaded, ids, shown, prompt_progress_callback=lambda *done: told.append(done)
    )
    offloaded.offload.close()
    assert got == want and relative_error(same, logprobs) <= 1e-5
    assert told[0] == (0, len(ids)) and told == sorted(told)


def test_what_is_kept_of_a_prompt_is_not_looked_at_again(model, eyes, arrays, media):
    ids, shown = golden_prompt(arrays, media, "mixed")
    fresh, _, _ = answer(model, ids, shown)
    prompts = PromptCache(model, "ab" * 16)
    eyes.seen.clear()
    first, _, _ = answer(model, ids, shown, prompts=prompts)
    assert first == fresh and eyes.seen == shown
    eyes.seen.clear()
    again, _, reply = answer(model, ids, shown, prompts=prompts)
    assert again == fresh and eyes.seen == []
    assert reply.cached_tokens == len(ids) - 1
    longer, _, reply = answer(model, [*ids, *first, 3, 4], shown, prompts=prompts)
    assert eyes.seen == [] and reply.cached_tokens >= len(ids) - 1
    assert longer == answer(model, [*ids, *first, 3, 4], shown)[0]


def test_another_picture_in_the_same_place_is_read(model, eyes, media):
    """Same text, same size: only the ids of the vectors tell the two prompts apart."""
    one, other = media["image0"], Processor().image(noise(106, 70))
    assert one.tokens == other.tokens
    prompts = PromptCache(model, "ab" * 16)
    first = answer(model, expand([1, PAD, 2, 3], [one], PAD), [one], prompts=prompts)
    ids = expand([1, PAD, 2, 3], [other], PAD)
    _, logprobs, reply = answer(model, ids, [other], prompts=prompts)
    assert eyes.seen == [one, other] and reply.cached_tokens <= 1
    _, alone, _ = answer(model, ids, [other])
    assert relative_error(logprobs, alone) <= 1e-5
    assert relative_error(logprobs, first[1]) > 1e-3


def test_a_prompt_may_begin_in_the_middle_of_a_picture(model, media):
    """What the cache holds ends anywhere."""
    one = media["image0"]
    ids = expand([1, PAD, 2, 3], [one], PAD)
    want, logprobs, _ = answer(model, ids, [one])
    cache = model.make_cache()
    embeddings = PromptEmbeddings(model.model.embed_tokens, model.vision.encode, ids[:6], [one])
    model(mx.full((1, 6), PAD), cache, embeddings[None])
    tokenizer = IdsOnly()
    sampling = Sampling(TOKENS, options={"prompt_cache": cache})
    parser = PlainParser(tokenizer)
    chunks = list(run(model, tokenizer, ids, parser, sampling, cached_tokens=6, media=[one]))
    assert [chunk.token for chunk in chunks] == want
    assert relative_error(np.array(chunks[0].logprobs), logprobs) <= 1e-4


def test_one_picture_twice(model, eyes, media):
    one = media["image1"]
    answer(model, expand([1, PAD, PAD, 2, PAD], [one] * 3, PAD), [one])
    assert eyes.seen == [one]


def test_generated_pads_are_ordinary_tokens(model, arrays, media):
    """A pad that the model says itself has the vocabulary's embedding, as in any text."""
    ids, shown = golden_prompt(arrays, media, "image")
    said = [*ids, PAD, 3]
    _, logprobs, _ = answer(model, said, shown)
    cache = model.make_cache()
    embeddings = PromptEmbeddings(model.model.embed_tokens, model.vision.encode, ids, shown)
    model(mx.full((1, len(ids)), PAD), cache, embeddings[None])
    logits = model(mx.array([[PAD, 3]]), cache)[0, -1]
    want = logits - mx.logsumexp(logits)
    assert relative_error(logprobs, want) <= 1e-4


def test_a_picture_that_is_not_given(model, media):
    ids = expand([1, PAD], [media["image0"]], PAD)
    for shown in ([], [media["image1"]]):
        with pytest.raises(K3Error, match="give it again"):
            answer(model, ids, shown)


def test_settings_that_do_not_fit_the_tower(model, media):
    embeddings = PromptEmbeddings(
        model.model.embed_tokens,
        lambda _: mx.zeros((5, 96)),
        media["image0"].ids,
        [media["image0"]],
    )
    with pytest.raises(K3Error, match="12 places gave 5 vectors"):
        embeddings[None]


def test_whoever_waits_can_leave_between_the_towers_blocks(model, arrays, media):
    ids, shown = golden_prompt(arrays, media, "image")
    told = []

    def progress(done, total):
        told.append((done, total))
        if len(told) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        answer(model, ids, shown, prompt_progress_callback=progress)
    assert told == [(0, len(ids))] * 3  # the loop's own, and two blocks of the tower


def test_the_tower_waits_for_the_first_picture(folder, media):
    model, _ = load(folder)
    answer(model, [1, 2, 3], [])
    assert not model.vision.is_loaded
    assert not [name for name, _ in tree_flatten(model.parameters()) if "vision" in name]
    vectors = model.vision.encode(media["image0"])
    assert model.vision.is_loaded and vectors.shape == (12, 96)
    assert vectors.dtype == (mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    assert vectors.dtype == model.model.embed_tokens(mx.array([0])).dtype


def test_no_vision_saves_its_memory_and_sees_nothing(folder, media):
    model, _ = load(folder, vision=False)
    assert model.vision is None and model.plan.vision_bytes == 0
    with_vision, without = (plan_load(folder, None, vision=v) for v in (True, False))
    assert with_vision.total_bytes - without.total_bytes == with_vision.vision_bytes > 0
    assert with_vision.minimum_bytes - without.minimum_bytes == with_vision.vision_bytes
    with pytest.raises(UnsupportedError, match="--no-vision"):
        answer(model, media["image0"].ids, [media["image0"]])


def test_a_build_without_its_tower(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "model-vision-00001-of-00001.safetensors").unlink()
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    index["weight_map"] = {k: f for k, f in index["weight_map"].items() if "vision" not in f}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    model, _ = load(copy)
    assert model.vision is None and model.plan.vision_bytes == 0
    with pytest.raises(UnsupportedError, match="no model-vision file"):
        require_vision(model)


def test_a_model_of_text(golden, tmp_path):
    folder = convert_golden(golden, "tiny-text", tmp_path)
    model, _ = load(folder)
    assert model.vision is None and model.plan.vision_bytes == 0
    with pytest.raises(UnsupportedError, match="reads text only"):
        require_vision(model)


def test_a_tower_that_is_not_whole(folder, tmp_path, media):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    file = copy / "model-vision-00001-of-00001.safetensors"
    weights = mx.load(str(file))
    lost = "vision_tower.encoder.blocks.1.wo.weight"
    mx.save_safetensors(str(file), {k: v for k, v in weights.items() if k != lost})
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    del index["weight_map"][lost]
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    model, _ = load(copy)
    with pytest.raises(CheckpointError, match=lost):
        model.vision.encode(media["image0"])


def test_prices_follow_the_code():
    assert vision_sizes.BLOCK_PATCHES == vision.BLOCK_PATCHES
    assert vision_sizes.TILE_BYTES["cpu"] == vision_attention.CPU_TILE_BYTES
    assert vision_sizes.TILE_BYTES["metal"] == vision_attention.TILE_BYTES


def test_the_tower_is_priced_exactly(folder, model, media):
    stored = vision_sizes.stored_vision(
        K3Config.from_file(folder), Processor(), open_checkpoint(LocalFolder(folder))
    )
    model.vision.encode(media["image0"])
    nbytes = sum(x.nbytes for _, x in tree_flatten(model.vision._vision.parameters()))
    device, dtype = ("cpu", "float32") if mx.default_device() == mx.cpu else ("metal", None)
    width = 4 if dtype else 2
    vectors = stored.patches // 4 * 96 * width
    scratch = vision_sizes.picture_bytes(stored, device, width)
    assert vision_sizes.vision_bytes(stored, device, dtype, scratch) == nbytes + vectors
    more = vision_sizes.vision_bytes(stored, device, dtype, scratch - 1000)
    assert more == nbytes + vectors + 1000


def test_kimi_k3s_tower_in_a_plan():
    file = Path(vision_sizes.__file__).parent / "kimi-k3-config.json"
    stored = vision_sizes.stored_vision(K3Config.from_file(file), Processor())
    weights = sum(math.prod(shape) for _, shape in stored.tensors.values())
    assert weights == pytest.approx(401e6 + 4096 * (4096 + 7168), rel=0.001)
    vectors = 65536 * 33 // 32 // 4 * 7168
    ample = 10**12  # scratch that a picture has no need to exceed
    assert vision_sizes.vision_bytes(stored, "metal", None, ample) == 2 * (weights + vectors)
    assert vision_sizes.vision_bytes(stored, "cpu", "float32", ample) == 4 * (weights + vectors)
    shown = CliRunner().invoke(app, ["plan", "kimi-k3", "--memory", "512GB"]).stdout
    assert "vision tower and a picture: 1.7" in shown and "--no-vision" in shown


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kilobytes of ru_maxrss")
def test_a_large_picture_keeps_to_the_plan(folder):
    """The growth of a process that looks at 8,100 patches is below what is planned for them."""
    code = f"""
import resource, numpy as np
from PIL import Image
from mlx_k3 import load
model, _ = load({str(folder)!r})
p = model.vision.processor
picture = lambda n: p.image(Image.fromarray(np.zeros((n, n, 3), np.uint8)))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
model.vision.encode(picture(112))
before = peak()
medium = picture(1260)
model.vision.encode(medium)
print(len(medium.pixels), peak() - before)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    patches, grown = map(int, shown.stdout.split())
    stored = vision_sizes.stored_vision(
        K3Config.from_file(folder), Processor(), open_checkpoint(LocalFolder(folder))
    )._replace(patches=patches)
    assert patches == 8100
    assert grown <= vision_sizes.picture_bytes(stored, "cpu", 4) + 30_000_000
