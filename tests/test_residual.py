"""The residual stream: the same whether a step is one kernel or several operations."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_k3 import load
from mlx_k3.kernels import using
from mlx_k3.models.residual import ResidualStream

from .support.measure import relative_error
from .support.metal import available, on_host, with_kernels
from .support.models import convert_golden

EPS = 1e-5


def walk(layers: int, block: int, D: int, tokens: int = 3) -> tuple[list[mx.array], mx.array]:
    """What the sublayers of a small stack read, and the last running sum.

    A sublayer gives a function of what it reads, so that each depends on all before.
    """
    mx.random.seed(0)
    stream = ResidualStream(mx.random.normal((2, tokens, D)), EPS)
    seen = []
    for layer in range(layers):
        for part in range(2):
            norm = nn.RMSNorm(D, eps=EPS)
            norm.weight = mx.random.normal((D,))
            x = stream.read(mx.random.normal((D,)), norm)
            if part == 0 and layer % block == 0:
                stream.start_block()
            seen.append(x)
            stream.add(mx.sin(x))
    return seen, stream.current


def test_one_kernel_a_step_gives_the_same() -> None:
    """Five layers in blocks of two: complete blocks, one under way, and each one's first layer."""
    with with_kernels():
        got, got_sum = walk(5, 2, 40)
        mx.eval(got, got_sum)
    with using("reference"):
        want, want_sum = walk(5, 2, 40)
    for x, y in zip([*got, got_sum], [*want, want_sum], strict=True):
        assert relative_error(x, y) < 1e-5


@pytest.mark.skipif(not available(), reason="no clang++ here")
def test_a_step_is_one_launch() -> None:
    """All but the first read of the stack and the two reads after a block begins."""
    with on_host() as launches:
        mx.eval(walk(4, 2, 40))
    steps = [dict(launch.template)["STEP"] for launch in launches]
    assert len(steps) == 2 * 4 - 1  # nothing to mix at first
    assert steps.count(False) == 2


def test_many_tokens_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    with using("reference"):
        want = walk(3, 2, 40, tokens=9)
    for module in ("blocks", "residual"):
        monkeypatch.setattr(f"mlx_k3.models.{module}.BLOCK_TOKENS", 4)
    with with_kernels():
        got = walk(3, 2, 40, tokens=9)
        mx.eval(got)
    for x, y in zip([*got[0], got[1]], [*want[0], want[1]], strict=True):
        assert relative_error(x, y) < 1e-5


@pytest.mark.parametrize("name", ["tiny-text", "tiny-kimi-linear"])
def test_a_model_with_kernels_matches_golden(golden, tmp_path, name) -> None:
    """A prompt and two tokens after it, with whatever kernels its sizes take."""
    model, _ = load(convert_golden(golden, name, tmp_path, experts="copy"), dtype="float32")
    expected = mx.load(str(golden / name / "expected.safetensors"))
    with with_kernels():
        cache = model.make_cache()
        logits = model(expected["input_ids"], cache=cache)
        assert relative_error(logits, expected["logits"]) < 1e-4
        for t in range(2):
            logits = model(expected["decode_ids"][:, t : t + 1], cache=cache)[:, 0]
            assert relative_error(logits, expected["decode_logits"][:, t]) < 1e-4
