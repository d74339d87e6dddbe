"""The kernels tried and timed on this device: what ``mlx-k3 doctor`` and ``mlx-k3 bench`` run."""
