"""Banks that take the experts' kernels, or round what their experts read; the option for it."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_k3.cli import main
from mlx_k3.config import K3Config
from mlx_k3.errors import UnsupportedError
from mlx_k3.kernels import using
from mlx_k3.kernels.experts import Packed, mxfp4_experts_reference
from mlx_k3.loader import load
from mlx_k3.models.bank import PROJECTIONS, ResidentBank

from .support.measure import relative_error
from .support.metal import available, on_host
from .support.models import convert_golden
from .support.offload import answer, in_memory, offloaded, prompt
from .support.packed import inputs

needs_clang = pytest.mark.skipif(not available(), reason="no clang++ here")


@pytest.fixture(scope="module")
def config(golden) -> K3Config:
    return K3Config.from_file(golden / "tiny-text")


@pytest.fixture(scope="module")
def arrays(config) -> tuple:
    return inputs(config.expert_dim, config.moe_intermediate_size, 4, 20)


def bank_of(config: K3Config, stacks: list[Packed]) -> ResidentBank:
    tensors = zip(PROJECTIONS, stacks, strict=True)
    return ResidentBank.over(
        config, {f"{n}.{part}": x for n, s in tensors for part, x in s._asdict().items()}
    )


@needs_clang
def test_a_few_tokens_take_the_kernels(config, arrays) -> None:
    z, indices, weights, *stacks = arrays
    bank = bank_of(config, stacks)
    z, indices, weights = z[:3], indices[:3], weights[:3]
    want = bank.summed(z, indices, weights)
    with on_host() as launches:
        got = bank.summed(z, indices, weights)
    assert [launch.kernel.name for launch in launches] == ["mxfp4_gate_up", "mxfp4_down"]
    assert relative_error(got, want) <= 1e-5
    with on_host() as launches:
        bank.train()
        bank.summed(z, indices, weights)
    assert "mxfp4_gate_up" not in [launch.kernel.name for launch in launches]


@pytest.mark.parametrize("tokens", [3, 20])
def test_a_bank_that_rounds_is_the_reference_that_rounds(config, arrays, tokens) -> None:
    z, indices, weights, *stacks = arrays
    z, indices, weights = z[:tokens], indices[:tokens], weights[:tokens]
    with using("reference"):
        want = mxfp4_experts_reference(
            z, indices, weights, *stacks, beta=4.0, linear_beta=25.0, mxfp8=True
        )
        plain = mxfp4_experts_reference(z, indices, weights, *stacks, beta=4.0, linear_beta=25.0)
    bank = bank_of(config, stacks)
    assert relative_error(bank(z, indices, weights), plain) < 1e-5
    bank.round_inputs()
    assert relative_error(bank(z, indices, weights), want) < 1e-5
    assert relative_error(want, plain) > 1e-3


@pytest.fixture(scope="module")
def packages(golden, tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("packages")
    return {name: convert_golden(golden, name, out) for name in ("tiny-text", "tiny-kimi-linear")}


def test_on_demand_rounds_as_resident_does(packages) -> None:
    resident = in_memory(packages["tiny-text"], activations="mxfp8")
    want = answer(resident, prompt(5), 10)
    assert not mx.array_equal(answer(in_memory(packages["tiny-text"]), prompt(5), 10), want)
    with offloaded(packages["tiny-text"], 8, activations="mxfp8") as model:
        assert mx.array_equal(answer(model, prompt(5), 10), want)


def test_load_rounds_or_refuses(packages) -> None:
    model, _ = load(packages["tiny-text"], activations="mxfp8")
    assert model.layers[1].mlp.switch_mlp.activation.mxfp8
    with pytest.raises(UnsupportedError, match="there is mxfp8"):
        load(packages["tiny-text"], activations="mxfp4")
    with pytest.raises(UnsupportedError, match="experts in MXFP4, and this model's are not"):
        load(packages["tiny-kimi-linear"], activations="mxfp8")


def test_the_option_is_said_once(packages, capsys, monkeypatch) -> None:
    def generate(activations: str) -> tuple[int, str]:
        options = ["--ids", "1,2,3", "--max-tokens", "1", "--activations", activations]
        monkeypatch.setattr(
            "sys.argv", ["mlx-k3", "generate", str(packages["tiny-text"]), *options]
        )
        with pytest.raises(SystemExit) as ended:
            main()
            raise SystemExit(0)
        return ended.value.code or 0, capsys.readouterr().err

    code, err = generate("mxfp8")
    assert (code, err.count("MXFP8")) == (0, 1)
    code, err = generate("mxfp4")
    assert (code, "--activations mxfp4: there is mxfp8" in err) == (2, True)
