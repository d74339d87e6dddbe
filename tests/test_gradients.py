"""Gradients of kernels, and the blocks that leave them out."""

from threading import Thread

import mlx.core as mx
import pytest

from mlx_k3.config import K3Config
from mlx_k3.kernels import without_gradients
from mlx_k3.kernels.gradient import differentiable
from mlx_k3.models import kimi
from mlx_k3.models.kimi import Model


def double(x: mx.array) -> mx.array:
    return 2 * x


def triple(x: mx.array) -> mx.array:
    return 3 * x


doubled = differentiable(double, triple)


@pytest.fixture
def has_gradient(tmp_path):
    """Whether the graph of what ``doubled`` gives has nodes for a gradient."""

    def look() -> bool:
        file = tmp_path / "graph.dot"
        mx.export_to_dot(str(file), doubled(mx.ones((2,))))
        return "CustomTransforms" in file.read_text()

    return look


def test_the_kernel_computes_and_the_reference_is_differentiated() -> None:
    x = mx.array([1.0, 2.0])
    assert mx.array_equal(doubled(x), 2 * x)
    assert mx.array_equal(mx.grad(lambda x: doubled(x).sum())(x), mx.array([3.0, 3.0]))


def test_a_block_without_gradients(has_gradient) -> None:
    assert has_gradient()
    with without_gradients():
        assert not has_gradient()
        assert mx.array_equal(doubled(mx.ones((2,))), mx.array([2.0, 2.0]))
        with without_gradients(False):
            assert has_gradient()
        assert not has_gradient()
    assert has_gradient()
    with pytest.raises(ZeroDivisionError), without_gradients():
        _ = 1 / 0
    assert has_gradient()


def test_other_threads_go_on_with_gradients(has_gradient) -> None:
    seen = []
    with without_gradients():
        thread = Thread(target=lambda: seen.append(has_gradient()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_a_model_has_gradients_while_it_trains(golden, has_gradient, monkeypatch) -> None:
    model = Model(K3Config.from_file(golden / "tiny-text" / "config.json"))
    seen = []

    class Stream(kimi.ResidualStream):
        def read(self, *arguments):
            seen.append(has_gradient())
            return super().read(*arguments)

    monkeypatch.setattr(kimi, "ResidualStream", Stream)
    model.train()(mx.array([[1, 2]]))
    reads = len(seen)
    assert reads == 2 * len(model.layers) + 1 and all(seen)
    model.eval()(mx.array([[1, 2]]))
    assert len(seen) == 2 * reads and not any(seen[reads:])
    assert has_gradient()
