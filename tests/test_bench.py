"""The kernels' cases, doctor's trial of them, and the benchmark that prints them."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from mlx_k3 import load, nano
from mlx_k3.bench import attention_cases, layer, measure, peers, report, run
from mlx_k3.bench import cases as bench_cases
from mlx_k3.bench import sizes as bench_sizes
from mlx_k3.bench.cases import cases
from mlx_k3.bench.sizes import tiny_sizes
from mlx_k3.cli import app
from mlx_k3.errors import K3Error, KernelError
from mlx_k3.kernels import build, situ, using, verdicts

from .conftest import REPOSITORY
from .support.metal import available, on_host

RATES = measure.Rates(copy=1e11, flops=1e12)
needs_clang = pytest.mark.skipif(not available(), reason="no clang++ here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (nano, verdicts):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    verdicts._stored.cache_clear()
    yield tmp_path / "cache"
    verdicts._stored.cache_clear()


def test_every_kernel_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cases, "mla_decode_pays", lambda *_: True)  # else on Hopper only
    sizes = tiny_sizes()._replace(contexts=(64,))
    sources = (REPOSITORY / "mlx_k3/kernels/source").glob("*.h")
    written = {path.stem for path in sources if "\nKERNEL {" in path.read_text()}
    assert {name for case in cases(sizes) for name in case.kernels} == written


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_mlx_lm_computes_the_same(dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the two columns of the table are of the same work."""
    listed, seen = iter([True]), set()  # listed as if it had a kernel, and run without
    monkeypatch.setattr(attention_cases, "mla_decode_pays", lambda *_: next(listed, False))
    for case in cases(tiny_sizes()._replace(dtype=dtype, contexts=(64,))):
        step = peers.mlx_lm_step(case)
        got, want = step(*case.state), case.step(*case.state)
        assert measure.error(got, want) < case.tolerance, case.name
        seen.add(case.operation)
    assert seen == set(peers.STEPS)


@needs_clang
def test_every_kernel_passes_its_trial() -> None:
    names = set()
    with on_host() as launches:
        for case in cases(tiny_sizes()):
            result = run.try_kernel(replace(case, chain=1), RATES, rounds=1)
            assert result.fault is None and result.error <= case.tolerance
            assert result.kernel_us > 0
            names.update(result.kernels)
    assert {launch.kernel.name for launch in launches} == names


def sabotage(folder: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Have situ's kernel say ``new`` where it says ``old``."""
    module = sys.modules["mlx_k3.kernels.situ"]
    text = (REPOSITORY / "mlx_k3/kernels/source/situ.h").read_text()
    assert old in text
    (folder / "situ.h").write_text(text.replace(old, new))
    monkeypatch.setattr(module, "_KERNEL", replace(module._KERNEL, folder=folder))


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor tries situ and the router only, in small."""
    for name in ("residual", "experts", "kda", "mla"):
        monkeypatch.delitem(bench_cases.GROUPS, name)
    monkeypatch.setattr(bench_sizes, "doctor_sizes", tiny_sizes)
    monkeypatch.setattr(measure, "rates", lambda: RATES)


@needs_clang
def test_a_wrong_kernel_is_told_and_not_used(
    tmp_path: Path, few_cases: None, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    sabotage(tmp_path, monkeypatch, "tanh_(g / BETA)", "tanh_(g / BETA) * 1.1f")
    with on_host() as launches:
        result = CliRunner().invoke(app, ["doctor", "--json"])
        assert result.exit_code == 1, result.output
        told = json.loads(result.stdout)
        assert told["kernels"] == "metal" and told["kernels_refused"] == ["situ"]
        assert [c["fault"] is None for c in told["kernel_checks"]] == [False] * 3 + [True] * 2
        assert told["problems"][0].startswith("kernels: situ off by 1.0e-01, more than 2e-02")
        # Without it the model computes right, in the same run and from then on.
        assert told["self_check_error"] <= 1e-4
        launches.clear()
        gate = mx.random.normal((4, 8))
        got = situ(gate, gate, 4.0, 25.0)
        assert not launches
        with using("reference"):
            assert mx.array_equal(got, situ(gate, gate, 4.0, 25.0))
        capsys.readouterr()
        load(nano.converted())
        said = capsys.readouterr().err
    assert said.count("\n") == 1 and "not used here" in said and "situ (off by" in said


@needs_clang
def test_a_mended_kernel_is_used_again(few_cases: None) -> None:
    verdicts.record({"situ": "off by 1", "router": "off by 2"})
    with on_host() as launches:
        result = CliRunner().invoke(app, ["doctor"])
        assert result.exit_code == 0, result.output
        assert "kernels      metal: 2 of 2 right" in result.stdout
        assert re.search(r"situ 3 x 64 +\de[-+]\d\d +[\d.]+ [um]s +\d+% of a copy\n", result.stdout)
        launches.clear()
        mx.eval(situ(mx.ones((4,)), mx.ones((4,)), 4.0, 25.0))
        assert len(launches) == 1


@needs_clang
def test_a_kernel_that_is_no_number_is_wrong(tmp_path, few_cases, monkeypatch) -> None:
    sabotage(tmp_path, monkeypatch, "tanh_(g / BETA)", "(g - g) / (g - g)")
    with on_host():
        case = next(cases(tiny_sizes(), ["situ"]))
        assert run.try_kernel(case, RATES, rounds=1).fault == "off by nan, more than 2e-02"


def test_a_kernel_that_does_not_compile_names_the_mend(monkeypatch) -> None:
    message = "[metal] Unable to build\nprogram_source:7:3: error: no such type\nmore"
    monkeypatch.setattr(mx, "eval", stopping_at_outputs(message))
    monkeypatch.setattr(build, "_mlx_kernel", lambda *_: lambda **arguments: ["outputs"])
    with using("metal"), pytest.raises(KernelError) as caught:
        situ(mx.ones((4,)), mx.ones((4,)), 4.0, 25.0)
    told = str(caught.value)
    assert "\n" not in told
    assert "kernel situ" in told and "error: no such type" in told and "mlx-k3 doctor" in told
    # For doctor it is a finding.
    with using("metal"):
        result = run.try_kernel(next(cases(tiny_sizes(), ["situ"])), RATES)
    assert "error: no such type" in result.fault and result.kernel_us is None


def stopping_at_outputs(message: str):
    real = mx.eval

    def evaluate(*arrays):
        if arrays == (["outputs"],):
            raise RuntimeError(message)
        return real(*arrays)

    return evaluate


def test_findings_are_kept_by_device_and_version(own_cache, monkeypatch) -> None:
    verdicts.record({"situ": "off by 1"})
    assert dict(verdicts.refused()) == {"situ": "off by 1"}
    monkeypatch.setattr(verdicts, "__version__", "999")
    verdicts._stored.cache_clear()
    assert verdicts.refused() == {} and verdicts.refusal() is None
    verdicts.record({"router": "off by 2"})
    monkeypatch.undo()
    assert [path.name for path in own_cache.iterdir()] == ["kernels.json"]
    assert len(json.loads((own_cache / "kernels.json").read_text())) == 2
    with verdicts.all_trusted():
        assert verdicts.refused() == {}


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"b": 1}}', '{"a"', "\xff"])
def test_a_damaged_file_is_said_and_written_anew(own_cache, text) -> None:
    own_cache.mkdir()
    (own_cache / "kernels.json").write_text(text, encoding="latin-1")
    with pytest.raises(KernelError, match=r"kernels\.json cannot be read; .* mlx-k3 doctor"):
        verdicts.refused()
    verdicts.record({"situ": "off by 1"})
    assert dict(verdicts.refused()) == {"situ": "off by 1"}


def test_bench_without_a_gpu(monkeypatch) -> None:
    if build.backend() != "reference":
        pytest.skip("there is a GPU")
    monkeypatch.setattr(report, "cpu_sizes", tiny_sizes)
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 20)
    arguments = ["bench", "--only", "situ", "--only", "experts"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert report.NO_KERNELS in shown.stdout
    rows = [line.split("|") for line in shown.stdout.splitlines() if line.startswith("| situ")]
    assert len(rows) == 3
    for _, _, kernel, with_python, plain, mlx_lm, floor, *_ in rows:
        assert kernel.strip() == with_python.strip() == "" and all(
            x.strip() for x in (plain, mlx_lm, floor)
        )
    data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert data["backend"] == "reference" and data["copy_gb_per_s"] > 0
    assert all(r["kernel_us"] is None and r["reference_us"] > 0 for r in data["results"])


def test_bench_of_no_such_group() -> None:
    result = CliRunner().invoke(app, ["bench", "--only", "sort"])
    assert isinstance(result.exception, K3Error)
    assert "situ, residual, router, experts, kda, mla, layer" in str(result.exception)


def test_a_layer_is_mlx_lm_s_layer() -> None:
    """With the same weights, to float32's precision."""
    sizes = tiny_sizes()._replace(dtype=mx.float32)
    ours, theirs = layer.run_layers(sizes, RATES, rounds=1)
    assert ours.name == "mlx-k3" and theirs.name == "mlx-lm"
    assert theirs.error < 1e-5
    assert "| mlx-lm |" in layer.table([ours, theirs])


def test_a_layer_has_at_most_40_kernels(monkeypatch) -> None:
    """Its kernels are launches, the rest is counted in the graph of what they read."""
    launches = []

    def launch(launch: build.Launch) -> list[mx.array]:
        launches.append(launch)
        outputs = [mx.zeros(shape, dtype) for shape, dtype in launch.outputs]
        mx.eval(outputs)
        return outputs

    monkeypatch.setitem(build.LAUNCHERS, "metal", launch)
    sizes = tiny_sizes()
    with using("metal"):
        (step, state), *_ = layer.forms(sizes).values()
        launches.clear()
        outputs = step(*state)
    names = [launch.kernel.name for launch in launches]
    assert sorted(names) == [
        *("attention_residual", "attention_residual", "kda_decode"),
        *("mxfp4_down", "mxfp4_gate_up", "router", "situ"),
    ]
    inputs = [x for launch in launches for x in launch.inputs]
    assert len(launches) + layer.count_kernels([*outputs, *inputs]) <= 40


def test_kernels_of_a_graph_are_counted() -> None:
    x = mx.random.normal((3, 4))
    mx.eval(x)
    y = mx.concatenate([(x @ x.T)[:2], mx.exp(x)[:, 1:], x[:, 1:]])  # 1 + 1 + 3 parts
    assert layer.count_kernels([y[1:], y.reshape(-1)]) == 5
