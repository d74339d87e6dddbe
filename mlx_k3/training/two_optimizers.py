"""The optimizer of a model that sees: one for the text, one for the tower and its projector.

The tower moves only in steps whose batch shows pictures. In the others it has no gradient, and
momentum alone would carry it away.
"""

from typing import Any

from mlx.optimizers import MultiOptimizer

TOWER = "vision"


class TwoOptimizers:
    """Applies ``text`` to all parameters but those under ``vision``, and ``tower`` to these."""

    def __init__(self, text: MultiOptimizer, tower: MultiOptimizer):
        self._text, self._tower = text, tower

    @property
    def state(self) -> dict[str, Any]:
        """Both states, a tree of arrays."""
        return {"text": self._text.state, "tower": self._tower.state}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._text.state, self._tower.state = state["text"], state["tower"]

    def init(self, parameters: dict[str, Any]) -> None:
        """State for ``parameters``."""
        text, tower = _apart(parameters)
        self._text.init(text)
        self._tower.init(tower)

    def apply_gradients(
        self, gradients: dict[str, Any], parameters: dict[str, Any]
    ) -> dict[str, Any]:
        """The updated parameters. Without gradients of the tower, it stays as it is."""
        text, tower = _apart(parameters)
        text_gradients, tower_gradients = _apart(gradients)
        text = self._text.apply_gradients(text_gradients, text)
        if tower_gradients is None:
            for part in self._tower.optimizers:
                part.state["step"] = part.step + 1  # The schedule goes on.
        else:
            tower = self._tower.apply_gradients(tower_gradients, tower)
        return text | {TOWER: tower}


def _apart(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The tree without the tower, and the tower's, if it is there."""
    return {name: part for name, part in tree.items() if name != TOWER}, tree.get(TOWER)
