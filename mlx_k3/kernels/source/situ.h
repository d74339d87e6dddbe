// SiTU-GLU, element by element: beta tanh(gate / beta) sigmoid(gate), times linear_beta
// tanh(up / linear_beta) or, without a linear beta, times up.
//
// gate, up, y of one shape. T: dtype of y. LINEAR: whether there is a LINEAR_BETA, and BETA.
// A group takes PER * GROUP_SIZE elements, each thread PER of them, independent of each other.

KERNEL {
  uint elements = 1;
  for (int i = 0; i < gate_ndim; ++i) elements *= gate_shape[i];
  const uint first = GROUP_X * (GROUP_SIZE * PER) + THREAD;
  UNROLL
  for (uint j = 0; j < PER; ++j) {
    const uint i = first + j * GROUP_SIZE;
    if (i < elements) {
      const float g = to_float(gate[i]);
      float u = to_float(up[i]);
      if (LINEAR) u = LINEAR_BETA * tanh_(u / LINEAR_BETA);
      y[i] = from_float<T>(BETA * tanh_(g / BETA) / (1.0f + exp_(-g)) * u);
    }
  }
}
