// SiTU-GLU, element by element: beta tanh(gate/beta) sigmoid(gate), times linear_beta
// tanh(up/linear_beta) or, without a linear beta, times up.
//
// T: dtype of gate, up and y. SIZE: elements. LINEAR: whether there is a LINEAR_BETA.
// One thread an element.

KERNEL {
  const uint i = GROUP_X * GROUP_SIZE + THREAD;
  if (i < SIZE) {
    const float g = to_float(gate[i]);
    float u = to_float(up[i]);
    if (LINEAR) u = LINEAR_BETA * tanh_(u / LINEAR_BETA);
    y[i] = from_float<T>(BETA * tanh_(g / BETA) / (1.0f + exp_(-g)) * u);
  }
}
